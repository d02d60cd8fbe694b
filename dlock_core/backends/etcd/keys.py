"""The keys of locks in etcd, and the transactions on them; pure.

Each holder and each waiter has one key, PREFIXlock/NAME/MODE/HOLDER with MODE "x" (exclusive) or "s" (shared); they are
served in the order in which their keys were created. PREFIXbase/NAME is added to the create revision and gives the
token: it is 0 unless a database has admitted greater tokens than etcd has revisions. (Idea of the order:
clientv3/concurrency of etcd.)
"""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlock_core.backend import AcquireRequest
    from dlock_core.backends.etcd.gateway import Answer, GatewayCall

__all__ = [
    "NOTHING",
    "Keys",
    "LockView",
    "StoredKey",
    "counted",
    "entries",
    "grant",
    "keep_alive",
    "revoke",
    "text",
    "time_to_live",
    "view",
]

Json = dict[str, Any]


class StoredKey(NamedTuple):
    """One key as it was found."""

    key: str
    value: str
    created: int
    lease: int
    modified: int = 0
    """0 for a key that did not exist."""


MAX_BASE: Final = 1 << 62
"""A number that, with a revision added, fits into 63 bits."""
_BASE: Final = re.compile(r"[0-9]{1,19}")
NOTHING: Final = StoredKey("", "", 0, 0)
"""A key that did not exist."""


class LockView(NamedTuple):
    """The answer of a transaction on one lock: whether it succeeded, and what it read at that moment."""

    has_taken: bool
    has_put: bool
    """Whether our key was created now, or was moved to another lease."""
    revision: int
    own: StoredKey
    base: int
    base_modified: int
    first: StoredKey
    """The first holder of the lock."""
    before: StoredKey
    """The youngest key that must be gone before ours can hold the lock."""


class Keys:
    """The keys of all locks under one prefix."""

    def __init__(self, prefix: str) -> None:
        self.locks, self.bases = f"{prefix}lock/", f"{prefix}base/"

    def lock(self, name: str) -> str:
        """Return the prefix of the keys of a lock, or of all locks."""
        return f"{self.locks}{name}/" if name else self.locks

    def base(self, name: str) -> str:
        """Return the key of the number that is added to the revisions of a lock."""
        return f"{self.bases}{name}"

    def own(self, request: AcquireRequest) -> str:
        """Return the one key of this holder."""
        return f"{self.locks}{request.name}/{'s' if request.shared else 'x'}/{request.holder}"

    def read(self, key: str) -> tuple[str, bool, str]:
        """Return name, shared and holder of a key."""
        name, mode, holder = key[len(self.locks) :].rsplit("/", 2)
        return name, mode == "s", holder

    def enter(self, request: AcquireRequest, lease: int, queue_lease: int = 0) -> GatewayCall:
        """Take the lock if no other key is ahead; otherwise join the queue, on the lease `queue_lease`."""
        otherwise = self._see(request)
        if queue_lease:  # This may arrive late, when our key already exists, and must not take it from its lease.
            _, queue = _txn([_there(self.own(request))], otherwise, self._queue(request, queue_lease))
            otherwise = [{"request_txn": queue}]
        return _txn([_none(self._rivals(request))], self._take(request, lease), otherwise)

    def queue(self, request: AcquireRequest, lease: int) -> GatewayCall:
        """Take a place in the queue, once."""
        put, *see = self._queue(request, lease)
        return _txn([_created(self.own(request), 0)], [put, *see], see)

    def promote(self, request: AcquireRequest, created: int, queue_lease: int, lease: int) -> GatewayCall:
        """Take the lock if our queue entry, created then, is the first: the key moves to the lease of the full ttl."""
        own, rivals = self._ours(request, created, queue_lease), self._rivals(request)
        see = [*self._see(request), _youngest(rivals, max_create_revision=str(created - 1))]
        take = self._take(request, lease)
        path, none_older = _txn([*own, _all_younger(rivals, created - 1)], take, see)
        if not request.shared:
            return path, none_older
        return _txn([*own, _none(rivals)], take, [{"request_txn": none_older}])  # a comparison of no keys is false

    def move(self, request: AcquireRequest, created: int, old: int, new: int) -> GatewayCall:
        """Put a grant that is still ours on another lease; if it is not on the old one, return whether it exists."""
        own = self.own(request)
        see = [_range(own, keys_only=True)]
        return _txn(self._ours(request, created, old), [_put(own, request.owner, new)], see)

    def _ours(self, request: AcquireRequest, created: int, lease: int) -> list[Json]:
        """Check that our key is on the lease on which it was last seen.

        A request that arrives late must not take it from the lease on which a later request has put it.
        """
        own = self.own(request)
        return [_created(own, created), {"key": text(own), "target": "LEASE", "lease": str(lease)}]

    def raise_base(self, request: AcquireRequest, view: LockView, base: int) -> GatewayCall:
        """Add this number to the lock's tokens, beginning with our own grant, unless another process was faster."""
        key = self.base(request.name)
        same = {"key": text(key), "target": "MOD", "mod_revision": str(view.base_modified)}
        return _txn([_created(view.own.key, view.own.created), same], [_put(key, str(base))], [])

    def held(self, owns: Sequence[str]) -> GatewayCall:
        """Check which of these keys exist."""
        return _txn([], [_range(own, keys_only=True) for own in owns], [])

    def leave(self, request: AcquireRequest) -> GatewayCall:
        """Delete our key."""
        return "kv/deleterange", {"key": text(self.own(request))}

    def end(self, entry: StoredKey) -> GatewayCall:
        """Delete a key, and no newer one of the same name."""
        return _txn([_created(entry.key, entry.created)], [{"request_delete_range": {"key": text(entry.key)}}], [])

    def present(self, key: str) -> GatewayCall:
        """Check whether a key exists."""
        return "kv/range", {"key": text(key), "keys_only": True}

    def listed(self, start: str, after: str, limit: int) -> GatewayCall:
        """List the keys with this prefix in alphabetical order, except those up to `after`."""
        key, end = f"{after}\0" if after else start, _end(start)
        return "kv/range", {"key": text(key), "range_end": text(end), "limit": str(limit)}

    def _take(self, request: AcquireRequest, lease: int) -> list[Json]:
        own = self.own(request)
        return [_put(own, request.owner, lease), _range(own), _range(self.base(request.name))]

    def _queue(self, request: AcquireRequest, lease: int) -> list[Json]:
        before = _youngest(self._rivals(request), limit=2)  # one of them may be our own
        return [_put(self.own(request), request.owner, lease), *self._see(request), before]

    def _see(self, request: AcquireRequest) -> list[Json]:
        first = _range(self.lock(request.name), _whole=True, limit="1", sort_order="ASCEND", sort_target="CREATE")
        return [_range(self.own(request)), _range(self.base(request.name)), first]

    def _rivals(self, request: AcquireRequest) -> str:
        """Return the prefix of the keys that exclude this request."""
        return f"{self.lock(request.name)}x/" if request.shared else self.lock(request.name)


def view(answer: Answer, own: str) -> LockView:
    """Parse the answer to `enter`, `queue` or `promote`."""
    responses = answer["responses"]
    if "response_txn" in responses[0]:
        return view(responses[0]["response_txn"], own)
    has_put = "response_put" in responses[0]
    found = [entries(response["response_range"]) for response in responses[has_put:]]
    (mine, base), others = found[:2], found[2:]
    first, before = [*others, [], []][:2]
    return LockView(
        bool(answer.get("succeeded")) and has_put,
        has_put,
        int(responses[-1]["response_range"]["header"]["revision"]),
        next(iter(mine), NOTHING),
        counted(base[0].value) if base else 0,
        base[0].modified if base else 0,
        next(iter(first), NOTHING),
        next((entry for entry in before if entry.key != own), NOTHING),
    )


def entries(found: Answer) -> list[StoredKey]:
    """Parse the answer to a range."""
    return [
        StoredKey(
            _plain(kv["key"]),
            _plain(kv.get("value", "")),
            int(kv["create_revision"]),
            int(kv.get("lease", 0)),
            int(kv["mod_revision"]),
        )
        for kv in found.get("kvs", [])
    ]


def counted(value: str) -> int:
    """Parse the number that is added to revisions; a damaged one, not a number or too great, counts as 0."""
    return base if _BASE.fullmatch(value) and (base := int(value)) <= MAX_BASE else 0


def grant(lease: int, ttl: int) -> GatewayCall:
    """Create a lease of this many whole seconds."""
    return "lease/grant", {"ID": str(lease), "TTL": str(ttl)}


def keep_alive(leases: Sequence[int]) -> GatewayCall:
    """Restart the ttl of all of these leases; answered one by one."""
    return "lease/keepalive", b"\n".join([b'{"ID":"%d"}' % lease for lease in leases])


def revoke(lease: int) -> GatewayCall:
    """End a lease, and its keys with it."""
    return "lease/revoke", {"ID": str(lease)}


def time_to_live(lease: int) -> GatewayCall:
    """Request the remaining time of a lease."""
    return "lease/timetolive", {"ID": str(lease)}


def text(plain: str) -> str:
    """Encode text for the gateway."""
    return b64encode(plain.encode()).decode()


def _plain(coded: str) -> str:
    return b64decode(coded).decode(errors="replace")


def _end(start: str) -> str:
    """Return the end of the range of keys with this prefix."""
    return start[:-1] + chr(ord(start[-1]) + 1)


def _txn(compare: list[Json], success: list[Json], failure: list[Json]) -> tuple[str, Json]:
    return "kv/txn", {"compare": compare, "success": success, "failure": failure}


def _created(key: str, revision: int) -> Json:
    return {"key": text(key), "target": "CREATE", "create_revision": str(revision)}


def _none(start: str) -> Json:
    return {**_created(start, 0), "range_end": text(_end(start))}


def _there(key: str) -> Json:
    return {**_created(key, 0), "result": "GREATER"}


def _all_younger(start: str, revision: int) -> Json:
    return {**_created(start, revision), "range_end": text(_end(start)), "result": "GREATER"}


def _put(key: str, value: str, lease: int = 0) -> Json:
    return {"request_put": {"key": text(key), "value": text(value), "lease": str(lease)}}


def _range(key: str, *, _whole: bool = False, **options: Any) -> Json:
    end = {"range_end": text(_end(key))} if _whole else {}
    return {"request_range": {"key": text(key), **end, **options}}


def _youngest(start: str, *, limit: int = 1, **options: Any) -> Json:
    return _range(start, _whole=True, limit=str(limit), sort_order="DESCEND", sort_target="CREATE", **options)
