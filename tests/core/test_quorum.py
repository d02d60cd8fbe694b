"""Any two majorities share a node, so no token is granted twice, whatever fails and in whatever order."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlock_core.backend import Holder, LockState, Released, RenewalFailure, Waiter
from dlock_core.backends.redlock.nodes import merge_states
from dlock_core.backends.redlock.quorum import (
    FORECAST_LEAD_US,
    Forecast,
    agreed,
    free_in,
    majority,
    released,
    renewal_result,
)

FIVE = 5
NEEDED = majority(FIVE)


@pytest.mark.parametrize("nodes", [3, 4, 5, 6, 7])
def test_two_majorities_share_a_node(nodes: int) -> None:
    sets = list(combinations(range(nodes), majority(nodes)))
    assert all(set(one) & set(other) for one in sets for other in sets)
    fewer = list(combinations(range(nodes), majority(nodes) - 1))
    assert any(not set(one) & set(other) for one in fewer for other in fewer)


def test_token_is_agreed_when_a_majority_has_drawn_it() -> None:
    assert agreed([7, 7, 9, 7, 8], 3) == 7
    assert agreed([7, 7, 9, 9, 8], 3) is None
    assert agreed([7, 7], 3) is None
    assert agreed([], 1) is None


@given(st.lists(st.floats(0, 60), min_size=1, max_size=FIVE), st.integers(0, 2))
def test_lock_may_be_free_when_enough_holds_have_run_out(waits: list[float], free: int) -> None:
    seconds = free_in(waits, free, NEEDED)
    assert seconds in waits
    ended = free + sum(wait <= seconds for wait in waits)
    assert ended >= min(NEEDED, free + len(waits))
    assert free + sum(wait < seconds for wait in waits) < max(NEEDED, free + 1)


def test_nobody_to_wait_for_is_no_wait() -> None:
    assert free_in([], 0, NEEDED) == 0.0


@given(st.integers(0, FIVE), st.integers(0, FIVE))
def test_renewal_is_known_when_the_silent_nodes_change_nothing(yes: int, silent: int) -> None:
    silent = min(silent, FIVE - yes)
    results = {True: 30.0, False: RenewalFailure.LOST, None: RenewalFailure.UNKNOWN}
    possible = {yes + more >= NEEDED for more in range(silent + 1)}
    assert renewal_result(yes, silent, NEEDED, 30.0) == results[possible.pop() if len(possible) == 1 else None]


@given(st.lists(st.sampled_from(Released), max_size=FIVE))
def test_release_is_told_by_a_majority_and_in_doubt_for_us(found: list[Released]) -> None:
    silent = FIVE - len(found)
    told = released(found, silent, NEEDED)
    assert (told is None) == (len(found) < NEEDED)
    if found.count(Released.RELEASED) >= NEEDED:
        assert told is Released.RELEASED
    if told is Released.RELEASED:
        assert found.count(Released.RELEASED) + silent >= NEEDED
    if told is Released.STOLEN:
        assert found.count(Released.STOLEN) + silent >= NEEDED


def test_release_told_by_three_of_five() -> None:
    assert released([Released.RELEASED, Released.RELEASED, Released.EXPIRED], 2, 3) is Released.RELEASED
    assert released([Released.EXPIRED, Released.EXPIRED, Released.EXPIRED], 2, 3) is Released.EXPIRED
    assert released([Released.STOLEN, Released.STOLEN, Released.EXPIRED], 2, 3) is Released.STOLEN
    assert (
        released([Released.RELEASED, Released.EXPIRED, Released.EXPIRED, Released.EXPIRED, Released.EXPIRED], 0, 3)
        is Released.EXPIRED
    )


def test_forecast_is_ahead_of_the_clocks_it_knows() -> None:
    assert Forecast().token(5.0) == 0
    assert Forecast(shown=1_000_000, at=5.0).token(5.5) == 1_500_000 + FORECAST_LEAD_US


@dataclass
class Node:
    """A master's record of one lock, kept as the scripts keep it: the holder, its token, and the counter."""

    holder: int = 0
    noted: int = 0
    counter: int = 0

    def grant(self, holder: int, proposal: int) -> int | None:
        if self.holder not in (0, holder):
            return None
        if not self.holder:
            self.holder, self.counter = holder, max(self.counter + 1, proposal)
            self.noted = self.counter
        return self.noted

    def adopt(self, holder: int, token: int) -> bool:
        if self.holder != holder:
            return False
        self.noted, self.counter = max(self.noted, token), max(self.counter, token)
        return True


@dataclass
class World:
    """Nodes whose keys may expire at any moment, and all grants in the order of their completion."""

    data: st.DataObject
    nodes: list[Node]
    granted: list[int] = field(default_factory=list)

    def attempt(self, holder: int) -> Iterator[None]:
        """Step through an attempt: its requests reach the nodes in any order; requests and replies may get lost."""
        floor, needed = max(self.granted, default=0), majority(len(self.nodes))
        proposal, drawn = self.data.draw(st.integers(0, 6)), dict[int, int]()
        for place in self.data.draw(st.permutations(range(len(self.nodes)))):
            yield
            if self.arrives() and (draw := self.nodes[place].grant(holder, proposal)) and self.arrives():
                drawn[place] = draw
        if len(drawn) < needed:
            return
        token, yes = agreed(list(drawn.values()), needed), needed
        if token is None:
            token, yes = max(drawn.values()), 0
            for place in self.data.draw(st.permutations(sorted(drawn))):
                yield
                yes += self.arrives() and self.nodes[place].adopt(holder, token) and self.arrives()
        if yes >= needed:
            assert token not in self.granted, "a token twice"
            assert token > floor, "a token that is not greater than one which was there before we asked"
            self.granted.append(token)

    def arrives(self) -> bool:
        return self.data.draw(st.integers(0, 7)) > 0

    def play(self, attempts: int) -> None:
        going = {holder: self.attempt(holder) for holder in range(1, attempts + 1)}
        while going:
            holder = self.data.draw(st.sampled_from(sorted(going)))
            if next(going[holder], self) is self:
                del going[holder]
            if not self.data.draw(st.integers(0, 3)):
                self.data.draw(st.sampled_from(self.nodes)).holder = 0


@settings(max_examples=200, deadline=None)
@given(st.data(), st.sampled_from([3, 5]))
def test_tokens_grow_and_none_is_given_twice_whatever_is_lost_or_runs_out(data: st.DataObject, number: int) -> None:
    World(data, [Node() for _ in range(number)]).play(4)


def test_token_that_only_one_of_a_majority_knew_is_surpassed_by_any_other_majority() -> None:
    nodes = [Node(), Node(counter=5), Node()]
    drawn = [nodes[0].grant(1, 0), nodes[1].grant(1, 0)]
    assert drawn == [1, 6]
    assert all(node.adopt(1, 6) for node in nodes[:2])
    nodes[0].holder = nodes[1].holder = 0
    assert max(nodes[0].grant(2, 0) or 0, nodes[2].grant(2, 0) or 0) > 6


def holder(name: str, token: int, expires_in: float = 9.0) -> Holder:
    return Holder(name, token, shared=False, owner="", expires_in=expires_in)


def waiter(name: str, waited_for: float) -> Waiter:
    return Waiter(name, shared=False, owner="", waited_for=waited_for)


def test_merged_state_shows_whom_a_majority_knows_and_until_when() -> None:
    states = [LockState("a", (holder("x", 7, left),)) for left in (9.0, 5.0, 7.0)] + [LockState("a", (holder("y", 8),))]
    (one,) = merge_states("a", [*states, LockState("a")]).holders
    assert (one.holder, one.token, one.expires_in) == ("x", 7, 5.0)
    assert merge_states("a", [*states[:2], *states[3:], LockState("a"), LockState("a")]).holders == ()


def test_merged_state_shows_each_waiter_once_and_the_longest_first() -> None:
    one = LockState("a", (holder("x", 7),), (waiter("w", 1.0), waiter("v", 3.0)))
    other = LockState("a", (holder("x", 7),), (waiter("v", 3.1),))
    late = LockState("a", (), (waiter("x", 5.0),))
    assert [each.holder for each in merge_states("a", [one, other, late]).waiters] == ["v", "w"]
