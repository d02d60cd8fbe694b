"""Checks whether an etcd cluster is fit to store leases."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from dlock_core.doctor.clocks import SAMPLE_COUNT, round_trip, wall
from dlock_core.doctor.finding import Finding, ok, unsafe, warning
from dlock_core.errors import BackendUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlock_core.backends.etcd.gateway import Gateway
    from dlock_core.runtime import Runtime

__all__ = ["diagnose"]

MIN_VERSION: Final = (3, 4)
DEFAULT_QUOTA_BYTES: Final = 2_147_483_648
"""Bytes at which etcd accepts no more writes, unless --quota-backend-bytes says otherwise."""
MAX_QUOTA_SHARE: Final = 0.8


async def diagnose(gateways: Sequence[tuple[str, Gateway]], runtime: Runtime) -> list[Finding]:
    """Examine every member (its address and a gateway to it alone); members that are down are findings."""
    told = {title: await _status(gateway, runtime) for title, gateway in gateways}
    reached = [title for title, status in told.items() if isinstance(status, dict)]
    if not reached:
        raise next(error for error in told.values() if isinstance(error, BackendUnavailable))
    asked = dict(gateways)[reached[0]]
    members = len((await _ask(asked, runtime, "cluster/member/list")).get("members", ()))
    alarms = (await _ask(asked, runtime, "maintenance/alarm", {"action": "GET"})).get("alarms", ())
    found = [_members(members), *_alarms(alarms), await _near(asked, runtime)]
    found.append(ok("clock", "no lock depends on it", "leases are counted by the leader's monotonic clock"))
    for title, status in told.items():
        found += [replace(one, part=title) for one in _member(status)]
    return found


async def _ask(gateway: Gateway, runtime: Runtime, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    ((answer,),) = await gateway.ask(runtime, "", [(path, body or {})])
    if "code" in answer or "error" in answer:
        raise gateway.failure("", answer)
    return answer


async def _status(gateway: Gateway, runtime: Runtime) -> dict[str, Any] | BackendUnavailable:
    try:
        return await _ask(gateway, runtime, "maintenance/status")
    except BackendUnavailable as error:
        return error


async def _near(gateway: Gateway, runtime: Runtime) -> Finding:
    seconds = []
    for _ in range(SAMPLE_COUNT):
        sent = wall()
        await _ask(gateway, runtime, "maintenance/status")
        seconds.append(wall() - sent)
    return round_trip(sorted(seconds)[SAMPLE_COUNT // 2])


def _members(number: int) -> Finding:
    measured = f"{number} members; {(number - 1) // 2} may fail"
    if number >= 3 and number % 2:
        return ok("members", measured)
    if number == 1:
        return warning("members", measured, "while it is away no lock can be taken", "run three or five")
    return warning("members", measured, "an even number survives no more failures than one less", "add or remove one")


def _alarms(alarms: Sequence[dict[str, Any]]) -> list[Finding]:
    remedy = "compact, defragment and disarm: etcdctl alarm list"
    names = ", ".join(sorted({str(alarm.get("alarm")) for alarm in alarms}))
    return [unsafe("alarm", names, "etcd refuses writes: no lease is granted", remedy)] if alarms else []


def _member(status: dict[str, Any] | BackendUnavailable) -> list[Finding]:
    if isinstance(status, BackendUnavailable):
        return [warning("reach", status.reason, "it takes no part in majorities", "start it, or correct the address")]
    return [_version(str(status.get("version"))), _leader(status), _size(int(status.get("dbSize", 0)))]


def _version(text: str) -> Finding:
    if tuple(map(int, re.findall(r"\d+", text)[:2])) >= MIN_VERSION:
        return ok("version", f"etcd {text}")
    return unsafe("version", f"etcd {text}", "its gateway lacks what dlock asks", "upgrade to 3.4 or newer")


def _leader(status: dict[str, Any]) -> Finding:
    leader, own = str(status.get("leader", "0")), str(status.get("header", {}).get("member_id"))
    if leader == "0":
        return unsafe("leader", "none", "without a leader no lock can be taken", "start a majority of the members")
    return ok("leader", "leads" if leader == own else "follows a leader")


def _size(size: int) -> Finding:
    measured = f"{size / 1e6:.1f} MB stored"
    if size < MAX_QUOTA_SHARE * DEFAULT_QUOTA_BYTES:
        return ok("size", measured)
    reason = "at its quota (2.1 GB unless set otherwise) etcd refuses writes"
    return warning("size", measured, reason, "compact and defragment it")
