"""`dlock release`: end one lease after asking, and never a newer one than was shown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

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

REFUSED = "nobody can be asked here: say --no-input to release it without a question"


class Release(NamedTuple):
    """A lease that was ended."""

    entry: Entry
    by: str

    def as_dict(self) -> dict[str, Any]:
        """Give it as JSON takes it, in schema 1."""
        return {"schema": 1, "released": self.entry.as_dict(), "by": self.by}


def choose_grant(found: Snapshot, name: str, token: int | None, *, asks: bool) -> Entry:
    """Choose the grant that is meant; raises CommandFailed when it is not there, or nobody says which."""
    holders = [entry for entry in found.entries if entry.role == "holder" and entry.kind == "lease"]
    if not holders:
        trouble = "".join(f"; {each.source}: {each.reason}" for each in found.unreadable)
        raise CommandFailed(plain(f"nobody holds a lease of {name!r}{trouble}"))
    if token is not None:
        return _with_token(holders, token)
    if len(holders) == 1:
        return _owned(holders[0])
    if not asks:
        raise CommandFailed(f"{len(holders)} hold it, so say which one: --token, {_listed(holders)}")
    return _owned(_picked(holders))


def confirm(entry: Entry, waiting: int) -> None:
    """Ask whether to go on; raises CommandFailed when the answer is no, or when there is nobody to ask."""
    if not is_interactive():
        raise CommandFailed(REFUSED)
    click.echo(f"{plain(entry.name)} in {plain(entry.source)}, {_told(entry)}, {waiting} waiting", err=True)
    question = "End this lease? What its holder has not committed by its next renewal is rolled back, or refused."
    if not click.confirm(question, default=False, err=True):
        raise CommandFailed("nothing was done")


def end(backend: Backend, entry: Entry, token: int) -> Release:
    """End the grant; raises CommandFailed when it is not there any more, or when nobody knows."""
    by = operator()
    try:
        ended = force_release(backend, entry.name, token, by=by, seconds=entry.seconds or 0.0)
    except BackendUnavailable as error:
        raise CommandFailed(plain(f"whether it ended is not known, look again: {error.reason}")) from None
    if not ended:
        raise CommandFailed(f"token {token} does not hold it any more: nothing was done")
    return Release(entry, by)


def _with_token(holders: Sequence[Entry], token: int) -> Entry:
    for entry in holders:
        if entry.token == token:
            return entry
    raise CommandFailed(f"token {token} does not hold it (any more): {_listed(holders)}")


def _owned(entry: Entry) -> Entry:
    if entry.token is None:
        raise CommandFailed(f"{plain(entry.described)} has no token: release it with the program that took it")
    return entry


def _picked(holders: Sequence[Entry]) -> Entry:
    if not is_interactive():
        raise CommandFailed(REFUSED)
    for number, entry in enumerate(holders, 1):
        click.echo(f"{number}. {plain(entry.source)}: {_told(entry)}", err=True)
    number = click.prompt("Which one", type=click.IntRange(1, len(holders)), err=True)
    return holders[number - 1]


def _listed(holders: Sequence[Entry]) -> str:
    return "; ".join(f"{entry.token} in {plain(entry.source)}: {plain(entry.described)}" for entry in holders)


def _told(entry: Entry) -> str:
    return f"held by {plain(entry.described)} for {seconds(entry.seconds)}, token {entry.token}"
