"""Any order of events keeps the promises: Hypothesis plays holders, waiters, clocks and deaths against a simple model.

Attempts are stepped by hand at the seam between engine and store, so that every interleaving can happen.
"""

from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from dlock_core.backend import AcquireRequest, Busy, Granted, Released
from dlock_core.backends.memory import CLAIM_S, WAITER_TTL_S
from dlock_core.errors import LeaseLost
from dlock_core.leases import engine
from dlock_core.leases.acquisition import new_request
from dlock_core.leases.lease import LeaseRecord
from dlock_core.options import LockOptions
from dlock_core.testing import ManualRuntime, MemoryBackend

TTL = 10.0


class OneLock(RuleBasedStateMachine):
    """Tracks which processes believe that they hold the lock; the store is never asked."""

    waiters: Bundle[Any] = Bundle("waiters")
    holders: Bundle[Any] = Bundle("holders")

    def __init__(self) -> None:
        super().__init__()
        self.runtime = ManualRuntime()
        self.store = MemoryBackend(self.runtime.now)
        self.known: list[LeaseRecord] = []
        self.tokens: list[int] = []
        self.line: list[str] = []
        """The waiters when we last looked, in order."""

    def believers(self) -> list[LeaseRecord]:
        return [held for held in self.known if held.remaining() > 0]

    def ask(self, request: AcquireRequest) -> LeaseRecord | None:
        sent = self.runtime.now()
        answer = self.runtime.run(self.store.try_acquire(self.runtime, request))
        if not isinstance(answer, Granted):
            return None
        held = LeaseRecord(self.store, request, answer, sent, self.runtime.now)
        assert answer.token not in self.tokens
        assert request.shared or answer.token > max(self.tokens, default=0)
        self.tokens.append(answer.token)
        self.known.append(held)
        return held

    @rule(target=holders, shared=st.booleans())
    def try_once(self, shared: bool) -> Any:
        held = self.ask(new_request("a", LockOptions(TTL, 0.0, shared=shared)))
        return multiple() if held is None else held

    @rule(target=waiters, shared=st.booleans())
    def begin_to_wait(self, shared: bool) -> Any:
        request = new_request("a", LockOptions(TTL, None, shared=shared))
        return request if self.ask(request) is None else multiple()

    @rule(request=waiters)
    def show_life(self, request: AcquireRequest) -> None:
        """Ask again, as a waiter does after each wake-up; a grant goes unnoticed, and its claim ends."""
        self.runtime.run(self.store.wait(self.runtime, request, Busy(0.0), 0.0))

    @rule(target=holders, request=consumes(waiters))
    def ask_for_the_last_time(self, request: AcquireRequest) -> Any:
        held = self.ask(request)
        if held is None:
            self.runtime.run(self.store.abandon(self.runtime, request))
        return multiple() if held is None else held

    @rule(request=consumes(waiters))
    def give_up(self, request: AcquireRequest) -> None:
        self.runtime.run(self.store.abandon(self.runtime, request))

    @rule(request=consumes(waiters))
    def die_while_waiting(self, request: AcquireRequest) -> None:
        """The waiter dies without abandoning its request."""

    @rule(held=holders)
    def release(self, held: LeaseRecord) -> None:
        believed = held.remaining() > 0
        found = self.runtime.run(engine.release(self.runtime, held))
        assert found is Released.RELEASED or not believed
        assert self.runtime.run(engine.release(self.runtime, held)) is found

    @rule(held=holders)
    def renew(self, held: LeaseRecord) -> None:
        believed = held.remaining() > 0
        try:
            self.runtime.run(engine.renew(self.runtime, held))
        except LeaseLost:
            assert not believed
        else:
            assert believed
            assert held.remaining() > TTL * 0.9

    @rule(seconds=st.sampled_from([0.001, CLAIM_S / 2, CLAIM_S, WAITER_TTL_S, TTL / 2, TTL]))
    def time_goes_by(self, seconds: float) -> None:
        self.runtime.advance(seconds)

    @rule(held=holders)
    def stranger_cannot_end_it(self, held: LeaseRecord) -> None:
        stranger = new_request("a", LockOptions(TTL, 0.0))
        self.runtime.run(self.store.abandon(self.runtime, stranger))
        assert not self.runtime.run(self.store.force_release(self.runtime, "a", held.token + 1_000_000))

    @invariant()
    def exclusive_holders_are_alone(self) -> None:
        believers = self.believers()
        assert len(believers) <= 1 or all(held.request.shared for held in believers)

    @invariant()
    def whoever_believes_to_hold_is_known_to_the_store(self) -> None:
        (state,) = self.runtime.run(self.store.inspect(self.runtime, "a"))
        stored = {holder.holder for holder in state.holders}
        assert {held.request.holder for held in self.believers()} <= stored

    @invariant()
    def first_come_first_served(self) -> None:
        (state,) = self.runtime.run(self.store.inspect(self.runtime, "a"))
        waiting = [waiter.holder for waiter in state.waiters]
        granted = {holder.holder for holder in state.holders}
        stayed = [holder for holder in self.line if holder in waiting]
        assert [holder for holder in waiting if holder in self.line] == stayed
        for place, holder in enumerate(self.line):
            assert holder not in granted or not set(self.line[:place]) & set(waiting)
        self.line = waiting

    @invariant()
    def a_free_lock_has_no_waiter_who_may_come_in(self) -> None:
        (state,) = self.runtime.run(self.store.inspect(self.runtime, "a"))
        if state.waiters and not state.holders:
            first = state.waiters[0].holder
            answer = self.runtime.run(self.store.try_acquire(self.runtime, new_request("a", LockOptions(TTL, 0.0))))
            assert not isinstance(answer, Granted)
            (state,) = self.runtime.run(self.store.inspect(self.runtime, "a"))
            assert state.holders[0].holder == first

    def teardown(self) -> None:
        self.runtime.advance(TTL + WAITER_TTL_S + CLAIM_S)
        self.runtime.run(self.store.inspect(self.runtime))
        assert self.store._states == {}


OneLock.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
test_any_order_of_events_keeps_the_promises = OneLock.TestCase
