"""Entries for tests that need no store: `holds("a", "order:1")`, `waits("b", "order:1", position=1)`."""

from typing import Any

from dlock_core.inspect import Entry


def holds(actor: str, name: str, **given: Any) -> Entry:
    return _entry(actor, name, {"role": "holder", "token": 1, **given})


def waits(actor: str, name: str, position: int, **given: Any) -> Entry:
    return _entry(actor, name, {"role": "waiter", "position": position, **given})


def _entry(actor: str, name: str, given: dict[str, Any]) -> Entry:
    usual: dict[str, Any] = {
        "kind": "lease", "source": "default", "mode": "exclusive", "owner": {}, "described": actor, "token": None,
        "seconds": 1.0, "expires_in": None, "position": None,
    }  # fmt: skip
    return Entry(**{**usual, **given, "name": name, "actor": actor})
