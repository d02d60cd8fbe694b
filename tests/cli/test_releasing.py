"""`release` ends no newer grant than it has shown, asks unless `--no-input` is given, and is logged."""

import json

import pytest

from dlock_core import Lock
from dlock_core.backend import Released
from dlock_core.observability import hooks
from tests.cli.running import dlock


@pytest.fixture
def release(redis_server):
    def run(*args: str):
        return dlock("release", *args, "--store", redis_server.url)

    return run


@pytest.fixture
def events():
    found: list[hooks.Event] = []
    hooks.subscribe(found.append)
    yield found
    hooks.unsubscribe(found.append)


def test_release_ends_the_lease_and_lets_the_next_one_in(backend, release):
    lease = Lock(backend, "order:42").acquire()
    ran = release("order:42", "--no-input")
    assert ran.code == 0
    assert f"released order:42 in redis, token {lease.token}, held by" in ran.out.replace("\n", " ")
    assert lease.release() is Released.EXPIRED
    with Lock(backend, "order:42", wait=0) as other:
        assert other.token > lease.token


def test_name_may_be_written_as_in_the_program(backend, release):
    lease = Lock(backend, "note:%C3%A4").acquire()
    assert release("note:ä", "--no-input").code == 0
    assert lease.release() is Released.EXPIRED


def test_token_that_holds_no_more_ends_nothing(backend, release):
    Lock(backend, "order:42").acquire().release()
    with Lock(backend, "order:42") as lease:
        ran = release("order:42", "--no-input", "--token", str(lease.token - 1))
        assert ran.code == 1
        assert str(lease.token) in ran.err
        lease.renew()


def test_newer_grant_than_the_one_that_was_shown_is_left_alone(backend, release, monkeypatch):
    """While the operator reads the question, the holder releases and another acquires."""
    first = Lock(backend, "order:42").acquire()
    second = []

    def answer(*_: object, **__: object) -> bool:
        first.release()
        second.append(Lock(backend, "order:42").acquire())
        return True

    monkeypatch.setattr("dlock_core.cli.release.is_interactive", lambda: True)
    monkeypatch.setattr("click.confirm", answer)
    ran = release("order:42")
    assert (ran.code, ran.err) == (1, f"token {first.token} no longer holds the lock: nothing was released")
    second[0].renew()
    second[0].release()


def test_nobody_there_to_ask_is_a_refusal(backend, release):
    with Lock(backend, "order:42") as lease:
        ran = release("order:42")
        assert ran.code == 1
        assert "--no-input" in ran.err
        lease.renew()


def test_no_is_an_answer(backend, release, monkeypatch):
    monkeypatch.setattr("dlock_core.cli.release.is_interactive", lambda: True)
    monkeypatch.setattr("click.confirm", lambda *_, **__: False)
    with Lock(backend, "order:42") as lease:
        assert (release("order:42").code, release("order:42").err) == (1, "nothing was released")
        lease.renew()


def test_of_several_shared_holders_one_is_named_by_its_token(backend, release):
    one, other = (Lock(backend, "report", shared=True, reentrant=False) for _ in range(2))
    first = one.acquire()
    from threading import Thread

    found = []
    thread = Thread(target=lambda: found.append(other.acquire()))
    thread.start()
    thread.join()
    ran = release("report", "--no-input")
    assert ran.code == 1
    assert "2 holders share this lock: pass --token" in ran.err
    assert release("report", "--no-input", "--token", str(found[0].token)).code == 0
    first.renew()
    assert first.release() is Released.RELEASED
    assert found[0].release() is not Released.RELEASED


def test_it_is_logged_and_signalled(backend, release, events, caplog):
    lease = Lock(backend, "order:42").acquire()
    release("order:42", "--no-input")
    lease.release()
    (event,) = [event for event in events if event.kind == "forced"]
    assert (event.name, event.token) == ("order:42", lease.token)
    assert event.reason.startswith("ended by ")
    (record,) = [record for record in caplog.records if "was ended by" in record.getMessage()]
    assert (record.name, record.levelname) == ("dlock", "WARNING")


def test_json_says_what_was_released(backend, release):
    lease = Lock(backend, "order:42").acquire()
    told = json.loads(release("order:42", "--no-input", "--format", "json").out)
    lease.release()
    assert told["schema"] == 1
    assert (told["released"]["name"], told["released"]["token"]) == ("order:42", lease.token)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("order:42", 1),
        ("*", 1),
        ("order:*", 1),
        ("'; DROP TABLE dlock_fence; --", 1),
        ("../order", 1),
        ("", 2),
        ("x" * 3000, 2),
        ("a::b", 2),
    ],
)
def test_name_is_a_name_and_never_a_pattern(backend, release, name, code):
    with Lock(backend, "order:1") as lease:
        assert release(name, "--no-input").code == code
        lease.renew()


def test_lock_of_another_program_has_no_token_and_is_left_alone(backend, release, redis_server):
    import redis

    with redis.Redis(port=redis_server.port) as client:
        client.set(backend.lock_key("order:42"), "theirs", px=30000)
        ran = release("order:42", "--no-input")
        assert ran.code == 1
        assert "has no token" in ran.err
        assert client.get(backend.lock_key("order:42")) == b"theirs"


def test_store_that_is_down_is_no_answer(release):
    ran = dlock("release", "order", "--no-input", "--store", "redis://localhost:1")
    assert ran.code == 1
    assert "refused" in ran.err
