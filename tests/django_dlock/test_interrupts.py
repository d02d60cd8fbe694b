"""An interrupt at each executed line of acquire, block, COMMIT, ROLLBACK and release leaves nothing that is renewed."""

import linecache
import logging
import uuid
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from django.db import connections, transaction
from django.db.transaction import atomic
from django.test import override_settings

from django_dlock import lock, locked, ownership, tie
from django_dlock.models import Fence
from django_dlock.tracker import leases_of_context
from dlock_core.backends.memory import MemoryBackend
from dlock_core.observability import hooks
from tests.interrupts import OURS, TELLS_OTHERS, SoftLimit, Tracer, each_line, grants, renewed
from tests.mysql_server import LIKE_A_DEADLOCK, mariadb_only
from tests.testapp.models import Counter

pytestmark = [
    pytest.mark.timeout(600),  # some 800 interrupted runs each, line by line: a loaded machine needs minutes
    pytest.mark.filterwarnings("ignore:coroutine:RuntimeWarning"),  # an interrupt may come before it is awaited
    pytest.mark.usefixtures("garbage_is_collected"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
HAS_NO_CALL = ("except BaseException as error:", "transaction.is_unanswered = True")
DJANGOS = ("django/db/transaction.py", "django/db/backends/base/base.py")


@pytest.fixture(autouse=True)
def _quiet(use_database) -> Iterator[None]:
    use_database("default")
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def memory() -> Iterator[MemoryBackend]:
    backend = MemoryBackend()
    with override_settings(DLOCK={"default": {"BACKEND": backend, "TTL": 30, "WAIT": 0}}):
        yield backend


class Sorry(Exception):
    """Raised by user code."""


def write() -> None:
    Counter.objects.create(name=uuid.uuid4().hex)


def block() -> None:
    with lock("order", 42), atomic():
        write()


def acquire() -> None:
    with atomic():
        lock("order", 42).acquire()
        write()


def rollback() -> None:
    with pytest.raises(Sorry), lock("order", 42), atomic():
        write()
        raise Sorry


def joined() -> None:
    with lock("order", 42), atomic():
        lock("order", 42).acquire()
        with lock("order", 42):
            write()


def manual() -> None:
    transaction.set_autocommit(False)
    try:
        lock("order", 42).acquire()
        write()
        transaction.commit()
    except BaseException:
        transaction.rollback()
        raise
    finally:
        transaction.set_autocommit(True)


def several() -> None:
    with lock(lock("order", 42), lock("order", 43)), atomic():
        write()


def decorated() -> None:
    locked("order", 42)(write)()


def savepoint() -> None:
    with lock("order", 42), atomic():
        with pytest.raises(Sorry), atomic():
            write()
            raise Sorry
        write()


WORKS = (block, acquire, rollback, joined, manual, several, decorated, savepoint)


@pytest.mark.parametrize(("work", "error"), [*((work, SoftLimit) for work in WORKS), (block, KeyboardInterrupt)])
def test_interrupt_at_any_line_leaves_no_lease_that_is_renewed(memory, work, error):
    left: list[str] = []
    for line, granted, surfaced in each_line(work, (*OURS, *DJANGOS), error):
        if renewed(granted):  # only where Django has not begun to end the transaction, which is still open
            assert "django/db/transaction.py" in line.file, line
            assert connections["default"].connection.in_transaction, line
        connections["default"].close()
        assert not renewed(granted), line
        assert surfaced or line.function.rpartition(".")[2] in TELLS_OTHERS, line
        if memory._states:
            left.append(line.function)
        start_over(memory)
    assert len(left) < 50, left  # nearly always it is released at once


def test_interrupt_while_work_is_rolled_back_commits_none_of_it_and_releases_nothing_before(memory):
    too_early: list[object] = []

    def hear(event: hooks.Event) -> None:
        driver = connections["default"].connection
        if event.kind == "released" and driver is not None and driver.in_transaction:
            too_early.extend(driver.execute(f"SELECT 1 FROM {Counter._meta.db_table}"))

    hooks.subscribe(hear)
    try:
        for line, _, _ in each_line(rollback, (*OURS, *DJANGOS)):
            assert not too_early, line
            connections["default"].close()
            start_over(memory)
            assert not Counter.objects.exists(), line
    finally:
        hooks.unsubscribe(hear)


def start_over(store: MemoryBackend) -> None:
    if hasattr(connections._connections, "default"):
        del connections["default"]
    for each in (leases_of_context, ownership._kept, ownership._joined, ownership._changes):
        each.set(())
    store._states.clear()


def test_release_by_hand_that_was_interrupted_at_once_can_be_repeated(memory):
    leases: list[Any] = []

    def by_hand() -> None:
        leases[:] = [lock("order", 42).acquire()]
        leases[0].release()

    for line, granted, _ in each_line(by_hand, OURS):
        if leases and renewed(granted):
            leases[0].release()
        leases.clear()
        assert not renewed(granted), line
        start_over(memory)


def close() -> None:
    connections["default"].close()


def next_transaction() -> None:
    with atomic():
        write()


@pytest.mark.parametrize("then", [next_transaction, close])
def test_lease_whose_release_was_interrupted_again_and_again_ends_with_the_next_use_of_the_connection(
    memory, monkeypatch, then
):
    """A connection may be kept for as long as its process lives (CONN_MAX_AGE)."""

    def interrupted(_: object) -> None:
        raise SoftLimit

    with grants() as granted:
        with pytest.raises(SoftLimit), monkeypatch.context() as patch:
            patch.setattr("django_dlock.transactions.Transaction.pending_steps", interrupted)
            acquire()
        assert renewed(granted)
        then()
        assert not renewed(granted)
    start_over(memory)


def send(sql: str) -> None:
    with connections["mariadb"].cursor() as cursor:
        cursor.execute(sql)


@mariadb_only
@pytest.mark.parametrize("files", [OURS, ("django/db/",)], ids=["ours", "django"])
def test_deadlock_whose_error_gives_way_to_an_interrupt_lets_nothing_be_committed_that_was_not_fenced(
    memory, use_database, monkeypatch, files
):
    use_database("mariadb")
    for name in ("may_run_another", "ends_transaction", "commits_implicitly"):
        monkeypatch.setattr(tie, name, lambda _: False)  # the statement that does it passes for an ordinary one
    fences = Fence.objects.using("mariadb").exclude(name="")

    def committed(tracer: Tracer) -> tuple[int, int]:
        with suppress(Exception), lock("order", 42, using="mariadb"), atomic("mariadb"):
            send("SELECT 1")
            with suppress(Exception), tracer:
                send(LIKE_A_DEADLOCK)
            send("INSERT INTO testapp_counter (name, value) VALUES ('a', 0)")
        connections["mariadb"].close()
        start_over(memory)
        return Counter.objects.using("mariadb").all().delete()[0], fences.delete()[0]

    counting = Tracer(files)
    assert committed(counting) == (1, 1)
    for at in counting.places:
        tracer = Tracer(files, at)
        written, admitted = committed(tracer)
        if written > admitted:  # a signal handler cannot run where nothing is called
            assert tracer.hit is not None
            assert linecache.getline(tracer.hit.file, tracer.hit.number).strip().startswith(HAS_NO_CALL), tracer.hit
