"""`dlock release`: end one lease after a confirmation, and never a newer one than was shown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from dlock_core.cli.layout import plain, seconds
from dlock_core.cli.sources import CommandFailed, is_interactive
from dlock_core.errors import BackendUnavailable
from dlock_core.stores import force_release, operator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlock_core.backend import Backend
    from dlock_core.inspect import Entry, Snapshot

__all__ = ["Release", "choose_grant", "confirm", "end"]

NO_TERMINAL: Final = "there is no terminal to ask for confirmation: pass --no-input to release the lease without it"


class Release(NamedTuple):
    """A lease that was released, and the name of the operator."""

    entry: Entry
    by: str

    def as_dict(self) -> dict[str, Any]:
        """Return the released lease as JSON data, in schema 1."""
        return {"schema": 1, "released": self.entry.as_dict(), "by": self.by}


def choose_grant(found: Snapshot, name: str, token: int | None, *, may_ask: bool) -> Entry:
    """Return the grant to release; raises CommandFailed if there is none, or if the choice among several is open."""
    holders = [entry for entry in found.entries if entry.role == "holder" and entry.kind == "lease"]
    if not holders:
        problems = "".join(f"; {each.source}: {each.reason}" for each in found.unreadable)
        raise CommandFailed(plain(f"no lease of {name!r} is held{problems}"))
    if token is not None:
        return _with_token(holders, token)
    if len(holders) == 1:
        return _require_token(holders[0])
    if not may_ask:
        raise CommandFailed(f"{len(holders)} holders share this lock: pass --token to choose one; {_listed(holders)}")
    return _require_token(_ask_which(holders))


def confirm(entry: Entry, waiting: int) -> None:
    """Ask for confirmation; raises CommandFailed if the answer is no, or if there is no terminal."""
    if not is_interactive():
        raise CommandFailed(NO_TERMINAL)
    click.echo(f"{plain(entry.name)} in {plain(entry.source)}, {_held_by(entry)}, {waiting} waiting", err=True)
    question = (
        "Release this lease? Work that its holder has not committed by its next renewal is rolled back or refused."
    )
    if not click.confirm(question, default=False, err=True):
        raise CommandFailed("nothing was released")


def end(backend: Backend, entry: Entry, token: int) -> Release:
    """End the grant; raises CommandFailed if it has ended already, or if the outcome is unknown."""
    by = operator()
    try:
        ended = force_release(backend, entry.name, token, by=by, seconds=entry.seconds or 0.0)
    except BackendUnavailable as error:
        raise CommandFailed(
            plain(f"it is not known whether the lease was released, so run `dlock show` to see: {error.reason}")
        ) from None
    if not ended:
        raise CommandFailed(f"token {token} no longer holds the lock: nothing was released")
    return Release(entry, by)


def _with_token(holders: Sequence[Entry], token: int) -> Entry:
    for entry in holders:
        if entry.token == token:
            return entry
    raise CommandFailed(f"token {token} does not hold the lock, but these do: {_listed(holders)}")


def _require_token(entry: Entry) -> Entry:
    if entry.token is None:
        raise CommandFailed(
            f"the lock of {plain(entry.described)} has no token, because another program took it: release it there"
        )
    return entry


def _ask_which(holders: Sequence[Entry]) -> Entry:
    if not is_interactive():
        raise CommandFailed(NO_TERMINAL)
    for number, entry in enumerate(holders, 1):
        click.echo(f"{number}. {plain(entry.source)}: {_held_by(entry)}", err=True)
    number = click.prompt("Release which one", type=click.IntRange(1, len(holders)), err=True)
    return holders[number - 1]


def _listed(holders: Sequence[Entry]) -> str:
    return "; ".join(f"{entry.token} in {plain(entry.source)}: {plain(entry.described)}" for entry in holders)


def _held_by(entry: Entry) -> str:
    return f"held by {plain(entry.described)} for {seconds(entry.seconds)}, token {entry.token}"
