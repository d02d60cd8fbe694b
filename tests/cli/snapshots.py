"""Snapshots made by hand, for tests of how they are drawn."""

import io
from typing import Any

from rich.console import Console, RenderableType

from dlock_core.inspect import Entry, Snapshot, cycles


def entry(name: str = "order:42", actor: str = "web1/1/1", **given: Any) -> Entry:
    facts = {
        "kind": "lease",
        "source": "default",
        "role": "holder",
        "mode": "exclusive",
        "owner": {"app": "shop", "pid": 1},
        "described": f"POST /orders/42/ship (shop@{actor})",
        "token": 1795249528080225,
        "seconds": 2.6,
        "expires_in": 17.8,
        "position": None,
    }
    return Entry(name=name, actor=actor, **{**facts, **given})


def waiter(name: str = "order:42", actor: str = "web2/1/1", position: int = 1, **given: Any) -> Entry:
    return entry(name, actor, **{"role": "waiter", "token": None, "expires_in": None, "position": position, **given})


def snapshot(*entries: Entry, **given: Any) -> Snapshot:
    return Snapshot(list(entries), cycles=cycles(entries), **given)


def drawn(what: RenderableType, width: int) -> list[str]:
    """Return the lines that a terminal of this width shows."""
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=True, color_system="truecolor", legacy_windows=False).print(what)
    return [without_style(line) for line in out.getvalue().splitlines()]


def without_style(line: str) -> str:
    import re

    return re.sub(r"\x1b\[[\d;]*m", "", line)
