"""Entries for tests that need no store: `holds("a", "order:1")`, `waits("b", "order:1", place=1)`."""

from typing import Any

from dlock_core.inspect import Entry


def holds(party: str, name: str, **given: Any) -> Entry:
    return _entry(party, name, {"role": "holder", "token": 1, **given})


def waits(party: str, name: str, place: int, **given: Any) -> Entry:
    return _entry(party, name, {"role": "waiter", "place": place, **given})


def _entry(party: str, name: str, given: dict[str, Any]) -> Entry:
    usual: dict[str, Any] = {
        "kind": "lease", "source": "default", "mode": "exclusive", "owner": {}, "described": party, "token": None,
        "seconds": 1.0, "expires_in": None, "place": None,
    }  # fmt: skip
    return Entry(**{**usual, **given, "name": name, "party": party})
