"""Django signals for what happens to locks and versions."""

import logging

import pytest
from django.db import transaction
from django.dispatch import receiver

from django_dlock import lock, retry_on_conflict, signals
from django_dlock.errors import AcquireTimeout, StaleObject, StaleToken
from django_dlock.models import Fence
from dlock_core.observability import hooks
from tests.testapp.models import Article, Counter


@pytest.fixture
def heard():
    """Return a function that connects to a signal, and returns a list of what it sends from then on."""
    connected = []

    def connect(signal):
        said = []

        def note(sender, **named):
            said.append(named)

        signal.connect(note)
        connected.append((signal, note))
        return said

    yield connect
    for signal, note in connected:
        signal.disconnect(note)
    assert not any(hook is signals._send for hook in hooks.subscribed)


@pytest.fixture(autouse=True)
def _place(store, use_database):
    use_database("default")


def test_lease_tells_of_its_beginning_and_its_end(heard):
    acquired, released = heard(signals.lock_acquired), heard(signals.lock_released)
    with lock("order", 42) as lease:
        assert acquired[0]["name"] == "order:42"
        assert acquired[0]["token"] == lease.token
        assert acquired[0]["contended"] is False
        assert not released
    assert (released[0]["token"], released[0]["reason"]) == (lease.token, "released")
    assert released[0]["seconds"] >= 0.0


def test_timeout_is_told(heard, party):
    said, other = heard(signals.lock_timed_out), party()
    holder = other.now(lambda: lock("order", 42).acquire())
    with pytest.raises(AcquireTimeout):
        lock("order", 42, wait=0).acquire()
    other.now(holder.release)
    assert [(each["name"], each["contended"]) for each in said] == [("order:42", True)]


def test_refused_versions_and_tokens_and_the_retry_after_them_are_told(heard):
    refused, retried = heard(signals.write_refused), heard(signals.work_retried)
    article = Article.objects.create()
    copies = iter([Article.objects.get(), None])
    article.save()

    @retry_on_conflict()
    def change():
        (next(copies) or Article.objects.get()).save_with_version()

    change()
    stale = Article.objects.get()
    Article.objects.update(title="x")
    with pytest.raises(StaleObject):
        Article.objects.bulk_update([stale], ["title"])
    name = f"Article({article.pk})"
    assert [(each["name"], each["reason"]) for each in refused] == [(name, "StaleObject")] * 2
    assert [(each["name"], each["reason"]) for each in retried] == [(name, "StaleObject")]


def test_stale_token_is_told_once(heard, party):
    said = heard(signals.write_refused)
    lease = lock("order", 42).acquire()
    with transaction.atomic():
        Counter.objects.create(name="in time")
    party().now(lambda: Fence.objects.update(token=lease.token + 1, holder="somebody newer"))
    with pytest.raises(StaleToken), transaction.atomic():
        Counter.objects.create(name="late")
    lease.release()
    assert [(each["name"], each["token"], each["reason"]) for each in said] == [("order:42", lease.token, "StaleToken")]


def test_receiver_that_fails_is_logged_and_changes_nothing(heard, caplog):
    said = heard(signals.lock_acquired)

    @receiver(signals.lock_acquired)
    def fail(sender, **named):
        raise ZeroDivisionError

    with caplog.at_level(logging.ERROR), lock("order", 42, fence=False):
        pass
    signals.lock_acquired.disconnect(fail)
    assert len(said) == 1
    assert "ZeroDivisionError" in caplog.text


def test_signals_cost_nothing_until_somebody_connects(heard):
    before = hooks.subscribed
    heard(signals.lock_lost)
    heard(signals.lock_forced)
    assert len(hooks.subscribed) == len(before) + 1


def test_async_receiver_is_refused():
    async def receive(sender, **named):
        pass

    class Receiver:
        async def __call__(self, sender, **named):
            pass

    for each in (receive, Receiver()):
        with pytest.raises(TypeError, match="is async"):
            signals.lock_acquired.connect(each)


def test_every_event_has_its_signal():
    assert {*signals._SIGNALS} == {*hooks.KINDS}
    assert {name for name in vars(signals) if isinstance(getattr(signals, name), signals.EventSignal)} == {
        *signals.__all__
    }
