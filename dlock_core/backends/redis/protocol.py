"""The representation of leases in Redis: keys, scripts with their arguments, and the meaning of the replies. No I/O.

One server, a Cluster and a Redlock use this protocol. Each Lua file's header documents its keys, arguments and reply.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache
from hashlib import sha1
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

from dlock_core.backend import Busy, Granted, Holder, LockState, Released, Waiter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlock_core.backend import AcquireRequest

__all__ = [
    "INSPECT_BATCH",
    "RELEASE_REPLIES",
    "Command",
    "Keyspace",
    "Script",
    "acquire_args",
    "holders_and_ttls",
    "load_script",
    "parse_acquire",
    "parse_states",
    "renewal_limit",
    "run_together",
    "shown",
    "ttl_ms",
]

Command = tuple[str | bytes, ...]
"""Only str and bytes. hiredis converts a number by a call that runs signal handlers, and does not check whether one of
them raised: the process would end with a segmentation fault."""

WAITER_TTL_MS: Final = "5000"
"""Milliseconds after its last request for which a waiter keeps its position in the queue."""
INSPECT_BATCH: Final = 500
"""Locks that are read by one inspection request, so that a large listing never blocks the server for long."""
RELEASE_REPLIES: Final = {1: Released.RELEASED, 0: Released.EXPIRED, 2: Released.STOLEN}
FOREIGN_OWNER: Final = "a client that is not dlock"

_INCLUDE: Final = re.compile(r"^ *--#include (\S+)\n", re.MULTILINE)
_EXCLUSIVE_VALUE: Final = re.compile(rb"[0-9a-f]+\|[0-9]+\|[0-9]+\|")
"""holder, token, since (s), and then the owner; any other value of a lock's key was written by another program."""
SHARED: Final = b"shared"
"""The value of the key of a shared lock; its holders are stored in other keys."""
NO_HOLDER: Final = (b"", SHARED)
"""Values that do not name a holder."""


@dataclass(frozen=True, slots=True)
class Script:
    """A script's text, and the digest by which the server identifies it after it was loaded."""

    text: str
    sha: str

    def by_digest(self, keys: Command, args: Command) -> Command:
        """Return the command that runs the script on a server that has loaded it."""
        return ("EVALSHA", self.sha, str(len(keys)), *keys, *args)

    def by_text(self, keys: Command, args: Command) -> Command:
        """Return the command that runs the script, and loads it on the server."""
        return ("EVAL", self.text, str(len(keys)), *keys, *args)


@cache
def load_script(name: str) -> Script:
    """Read a script from its file; the first line `--#include FILE` is replaced by that file's text."""
    text = _with_includes(f"{name}.lua", set())
    return Script(text, sha1(text.encode(), usedforsecurity=False).hexdigest())


def _with_includes(file: str, included: set[str]) -> str:
    if file in included:
        return ""
    included.add(file)
    text = files(__package__).joinpath("lua", file).read_text(encoding="ascii")
    return _INCLUDE.sub(lambda found: _with_includes(found[1], included), text)


class Keyspace:
    """The keys with one prefix: each lock's, the counter that tokens are drawn from, and the set of held locks."""

    __slots__ = ("common", "held_locks", "prefix", "wake_lists")

    def __init__(self, prefix: str, *more: str) -> None:
        self.prefix, self.held_locks, self.wake_lists = prefix, f"{prefix}locks", f"{prefix}wake:"
        self.common = (f"{prefix}token", self.held_locks, *more)
        """The keys that most scripts take after the lock's key."""

    @property
    def listing(self) -> Command:
        """The command that lists the keys of the locks that are held or waited for, and of some that have run out.

        It is not a script, which would block the server four times as long: Lua copies every key.
        """
        return ("SMEMBERS", self.held_locks)

    def lock(self, name: str) -> str:
        """Return a lock's key. Its companion keys begin with it, and so have the same hash tag."""
        return f"{self.prefix}{{{name}}}"

    def locks(self, requests: Sequence[AcquireRequest]) -> tuple[str, ...]:
        """Return the key of each of these locks."""
        prefix = self.prefix
        return tuple([f"{prefix}{{{request.name}}}" for request in requests])

    def of(self, name: str) -> tuple[str, ...]:
        """Return the keys of a script for one lock."""
        return (f"{self.prefix}{{{name}}}", *self.common)

    def names_of(self, keys: Sequence[bytes]) -> list[str]:
        """Return the names of the locks that have these keys."""
        before = len(self.prefix) + 1
        return [key.decode("utf-8", "replace")[before:-1] for key in keys]


def ttl_ms(request: AcquireRequest) -> str:
    """Return a request's ttl as the scripts take it."""
    return str(math.ceil(request.ttl * 1000))


def acquire_args(request: AcquireRequest, listener: str = "") -> tuple[str, ...]:
    """Return the arguments of acquire.lua: holder, ttl in ms, mode, owner, ms in the queue, floor, barging.

    With a `listener` there are two more: no forecast of a token, and the listener that a hand-over wakes.
    """
    args = (
        request.holder,
        ttl_ms(request),
        "s" if request.shared else "x",
        request.owner,
        WAITER_TTL_MS if request.queue else "0",
        str(request.floor),
        "0" if request.fair else "1",
    )
    return (*args, "0", listener) if listener else args


def parse_acquire(request: AcquireRequest, reply: Any) -> Granted | Busy:
    """Return the meaning of acquire.lua's reply: a token, or the ms until the lock may be free and its key's value.

    A Busy has a ticket if the holder is dlock's, whose release wakes the waiters; another library's does not.
    """
    if isinstance(reply, int):
        return Granted(reply, request.ttl)
    retry_after, value = reply[0] / 1000, reply[1].decode(errors="replace")
    parts = value.split("|", 3)
    if len(parts) < 4 and value:
        return Busy(retry_after, FOREIGN_OWNER)
    return Busy(retry_after, parts[-1], ticket=request.holder)


def holders_and_ttls(requests: Sequence[AcquireRequest]) -> tuple[str, ...]:
    """Return the arguments of a script for many locks: the concatenated holders, and one ttl in ms, or one for each."""
    ttls = [request.ttl for request in requests]
    of_each = ttls[:1] if len({*ttls}) == 1 else ttls
    return (run_together(requests), *[str(math.ceil(ttl * 1000)) for ttl in of_each])


def run_together(requests: Sequence[AcquireRequest]) -> str:
    """Return the holders as one text with 32 characters for each: a thousand arguments would cost more."""
    return "".join([request.holder for request in requests])


def renewal_limit(timeout: float, requests: Sequence[AcquireRequest]) -> float:
    """Return the time limit of a renewal, in seconds: an answer after a third of a ttl would come too late."""
    return min(timeout, min([request.ttl for request in requests]) / 3)


def parse_states(names: Sequence[str], reply: Sequence[Any]) -> list[LockState]:
    """Return the state of each of these locks from the reply of inspect.lua."""
    now, values, lefts, *crowds = reply
    now, owners = int(now) / 1000, dict[bytes, str]()
    states = [
        LockState(name, (_holder(value, left / 1000, now, owners),) if left != -2 and value not in NO_HOLDER else ())
        for name, value, left in zip(names, values, lefts, strict=True)
    ]
    for number, sharers, waiters in crowds:
        name, holders, _ = states[number - 1]
        if values[number - 1] == SHARED:
            holders = tuple(
                [_holder(text, float(expiry) / 1000 - now, now, owners, shared=True) for _, expiry, text in sharers]
            )
        states[number - 1] = LockState(name, holders, tuple([_waiter(*waiter, now=now) for waiter in waiters]))
    return states


def shown(states: Sequence[LockState]) -> list[LockState]:
    """Return the locks that a listing shows: those that are held or waited for."""
    return [state for state in states if state.holders or state.waiters]


def _holder(value: bytes, left: float, now: float, owners: dict[bytes, str], *, shared: bool = False) -> Holder:
    """Return the holder. `owners` caches the texts: a process mostly has one text for all its leases."""
    expires_in = left if left >= 0 else None
    if _EXCLUSIVE_VALUE.match(value) is None:
        return Holder(value.decode(errors="replace"), 0, shared, FOREIGN_OWNER, expires_in)
    holder, token, since, text = value.split(b"|", 3)
    owner = owners.get(text)
    if owner is None:
        owner = owners[text] = text.decode(errors="replace")
    held_for = now - int(since)
    return Holder(holder.decode(), int(token), shared, owner, expires_in, held_for if held_for > 0 else 0.0)


def _waiter(holder: bytes, arrival_us: bytes, entry: bytes, *, now: float) -> Waiter:
    parts = entry.decode(errors="replace").split("|", 5)
    shared, owner = (parts[1] == "s", parts[5]) if len(parts) == 6 else (False, "")
    return Waiter(holder.decode(errors="replace"), shared, owner, max(0.0, now - float(arrival_us) / 1_000_000))
