"""DLOCK is read late and checked before any I/O, and makes one backend per process and store."""

from __future__ import annotations

import math
import threading
from contextlib import suppress
from datetime import timedelta

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings

from django_dlock.conf import InvalidStore, Store, Stores, UnknownStore, stores
from dlock_core import stores as registry


class FakeBackend:
    """The minimum that passes for a backend."""

    made: list[FakeBackend] = []

    def __init__(self, **options):
        self.options, self.closed = options, 0
        self.made.append(self)

    def try_acquire(self):
        raise NotImplementedError

    def close(self):
        self.closed += 1


FAKE = f"{__name__}.FakeBackend"


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(FakeBackend, "made", [])
    monkeypatch.delenv("DLOCK_URL", raising=False)
    stores.reset()
    yield
    monkeypatch.undo()
    stores.reset()


def only(**entry):
    return override_settings(DLOCK={"default": entry})


def message_of(**entry):
    with only(**entry), pytest.raises(InvalidStore) as caught:
        stores["default"]
    return str(caught.value)


def test_a_store_is_a_frozen_value_with_seconds():
    with only(BACKEND=FAKE, TTL=timedelta(minutes=1), WAIT=3):
        store = stores["default"]

    assert store == Store("default", FakeBackend.made[0], ttl=60.0, wait=3.0)
    with pytest.raises(AttributeError):
        store.ttl = 1


def test_what_is_not_said_is_thirty_seconds_of_ttl_and_ten_of_wait():
    with only(BACKEND=FAKE):
        assert (stores["default"].ttl, stores["default"].wait) == (30.0, 10.0)


def test_wait_may_be_for_ever():
    with only(BACKEND=FAKE, WAIT=None):
        assert stores["default"].wait is None


class SlowBackend(FakeBackend):
    """Its constructor waits for a second thread to enter it, too."""

    both_inside = threading.Barrier(2, timeout=0.3)

    def __init__(self):
        super().__init__()
        with suppress(threading.BrokenBarrierError):
            self.both_inside.wait()


def test_the_backend_is_shared_by_all_threads_and_made_once():
    found = []

    with only(BACKEND=f"{__name__}.SlowBackend"):
        threads = [threading.Thread(target=lambda: found.append(stores["default"])) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert len(found) == 4
    assert len({id(store) for store in found}) == len(FakeBackend.made) == 1


class InterruptedBackend(FakeBackend):
    """While it is made, a signal handler asks for the same store."""

    asked: list[Store] = []

    def __init__(self):
        super().__init__()
        if not self.asked:
            self.asked.append(None)
            self.asked[:] = [stores["default"]]


def test_a_signal_handler_that_asks_for_a_store_while_it_is_made_shares_it(monkeypatch):
    monkeypatch.setattr(InterruptedBackend, "asked", [])
    with only(BACKEND=f"{__name__}.InterruptedBackend"):
        assert [stores["default"]] == InterruptedBackend.asked


def test_options_reach_a_dotted_path():
    with only(BACKEND=FAKE, OPTIONS={"prefix": "shop:"}):
        assert stores["default"].backend.options == {"prefix": "shop:"}


def test_a_url_is_connected_by_the_registry():
    with only(BACKEND="memory://"):
        assert type(stores["default"].backend) is type(registry.connect("memory://"))


def test_a_backend_may_be_given_as_it_is():
    backend = FakeBackend()
    with only(BACKEND=backend):
        assert stores["default"].backend is backend


def test_a_changed_setting_closes_what_was_made_and_makes_anew():
    with only(BACKEND=FAKE):
        before = stores["default"].backend
        with only(BACKEND=FAKE, TTL=5):
            assert before.closed == 1
            assert stores["default"].ttl == 5.0
            assert stores["default"].backend is not before


def test_a_backend_of_the_project_is_never_closed_for_it():
    backend = FakeBackend()
    with only(BACKEND=backend):
        assert stores["default"].backend is backend
    stores.reset()

    assert backend.closed == 0


def test_other_settings_leave_the_stores_alone():
    with only(BACKEND=FAKE):
        before = stores["default"]
        with override_settings(USE_TZ=False):
            assert stores["default"] is before


def test_close_all_closes_each_backend():
    with override_settings(DLOCK={"default": {"BACKEND": FAKE}, "ledger": {"BACKEND": FAKE}}):
        assert [store.alias for store in stores.all()] == ["default", "ledger"]
        stores.close_all()

    assert all(backend.closed for backend in FakeBackend.made)


def test_a_store_that_nobody_asked_for_is_never_made():
    with override_settings(DLOCK={"default": {"BACKEND": FAKE}, "broken": {"BACKEND": "no.such.path"}}):
        assert stores["default"].alias == "default"


def test_an_unknown_store_is_told_which_there_are():
    with (
        override_settings(DLOCK={"default": {"BACKEND": FAKE}, "ledger": {"BACKEND": FAKE}}),
        pytest.raises(UnknownStore, match=r"no store 'legder', only: 'default', 'ledger'"),
    ):
        stores["legder"]


def test_without_a_setting_the_environment_names_the_default_store(monkeypatch):
    monkeypatch.setenv("DLOCK_URL", "memory://")

    assert stores["default"].backend.try_acquire


def test_a_setting_beats_the_environment(monkeypatch):
    monkeypatch.setenv("DLOCK_URL", "memory://")
    with only(BACKEND=FAKE):
        assert isinstance(stores["default"].backend, FakeBackend)


def test_with_neither_the_error_shows_what_to_write():
    with pytest.raises(ImproperlyConfigured, match=r'DLOCK = \{"default": \{"BACKEND": "redis://.*DLOCK_URL'):
        stores["default"]


@pytest.mark.parametrize("setting", [[], "redis://localhost", {1: {"BACKEND": FAKE}}, {"": {"BACKEND": FAKE}}, 7])
def test_a_setting_that_is_no_dict_of_stores_is_refused(setting):
    with override_settings(DLOCK=setting), pytest.raises(InvalidStore, match="DLOCK: must be a dict of stores by name"):
        stores["default"]


@pytest.mark.parametrize("entry", ["redis://localhost", None, []])
def test_an_entry_that_is_no_dict_is_refused_by_its_path(entry):
    with override_settings(DLOCK={"default": entry}), pytest.raises(InvalidStore, match=r"DLOCK\['default'\]: must be"):
        stores["default"]


@pytest.mark.parametrize("ttl", [0, -1, True, math.nan, math.inf, "30", None, timedelta(0), 10**400])
def test_a_wrong_ttl_is_refused_by_its_path(ttl):
    assert message_of(BACKEND=FAKE, TTL=ttl).startswith("DLOCK['default']['TTL']: ttl ")
    assert not FakeBackend.made


@pytest.mark.parametrize("wait", [-1, False, math.nan, math.inf, "10", timedelta(seconds=-1)])
def test_a_wrong_wait_is_refused_by_its_path(wait):
    assert message_of(BACKEND=FAKE, WAIT=wait).startswith("DLOCK['default']['WAIT']: wait ")
    assert not FakeBackend.made


def test_a_misspelt_key_is_refused_with_those_there_are():
    assert message_of(BACKEND=FAKE, TIMEOUT=3) == (
        "DLOCK['default']: has the unknown key 'TIMEOUT'; known are BACKEND, TTL, WAIT, OPTIONS"
    )


def test_a_missing_backend_is_named():
    assert message_of(TTL=3).startswith("DLOCK['default']['BACKEND']: is missing")


@pytest.mark.parametrize("backend", ["no.such.path", "dlock", "nosuch://host", 7, None, FakeBackend, "builtins.dict"])
def test_a_backend_that_is_none_is_refused_by_its_path(backend):
    assert message_of(BACKEND=backend).startswith("DLOCK['default']['BACKEND']: cannot be used: ")


def test_options_have_to_be_a_dict():
    assert message_of(BACKEND=FAKE, OPTIONS="db=1").startswith("DLOCK['default']['OPTIONS']: must be a dict, not str")


def test_options_for_a_backend_that_is_made_already_are_refused():
    assert message_of(BACKEND=FakeBackend(), OPTIONS={"db": 1}).startswith("DLOCK['default']['OPTIONS']: has no effect")


def test_a_wrong_entry_is_an_error_every_time_not_only_the_first():
    with only(BACKEND=FAKE, TTL=0):
        for _ in range(2):
            with pytest.raises(InvalidStore):
                stores["default"]


def everything_said(error):
    seen = []
    while error is not None:
        seen.append(str(error))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "\n".join(seen)


@pytest.mark.parametrize(
    "url",
    [
        "nosuch://:hunter2@host",
        "redis://user:hunter2@host:notaport/0",
        "redis://:hunter2@[::1/0",
        "redis://:hun/ter2@host:6379/0",
        "redis://user:hunter2\u2100@host/0",
        "redis://host:notaport/0?password=hunter2",
        "redis://:hunter2@host:6379/notanumber",
        "redis:/:hunter2@host",
    ],
)
def test_a_password_is_in_no_message(url):
    try:
        with only(BACKEND=url):
            said = repr(stores["default"])
    except InvalidStore as error:
        said = everything_said(error)

    assert "hun" not in said
    assert "ter2" not in said


def test_a_factory_that_quotes_its_url_does_not_spread_the_password(monkeypatch):
    def quote(url):
        raise ValueError(f"cannot parse {url}")

    monkeypatch.setattr("django_dlock.conf.connect", quote)
    with only(BACKEND="x://:hunter2@host"), pytest.raises(InvalidStore) as caught:
        stores["default"]

    assert everything_said(caught.value) == "DLOCK['default']['BACKEND']: cannot be used (ValueError)"


@pytest.mark.parametrize("interrupt", [type("SoftTimeLimitExceeded", (Exception,), {}), TimeoutError])
def test_exception_of_a_signal_handler_is_no_wrong_setting(monkeypatch, interrupt):
    def interrupted(url):
        raise interrupt  # what Celery's soft time limit, or a handler of SIGALRM, does at any line

    monkeypatch.setattr("django_dlock.conf.connect", interrupted)
    with only(BACKEND="x://host"), pytest.raises(interrupt):
        stores["default"]


@pytest.mark.parametrize("wrong", [ImportError, ValueError, TypeError, KeyError, AttributeError, FileNotFoundError])
def test_error_of_a_wrong_setting_names_the_entry(monkeypatch, wrong):
    def refuse(url):
        raise wrong("no such certificate")

    monkeypatch.setattr("django_dlock.conf.connect", refuse)
    with only(BACKEND="x://host"), pytest.raises(InvalidStore, match=r"default.*no such certificate"):
        stores["default"]


def test_settings_may_be_given_in_code():
    assert Stores({"default": {"BACKEND": FAKE, "TTL": 7}})["default"].ttl == 7.0
