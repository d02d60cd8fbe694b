"""Checks whether a set of Redis masters is fit to store leases by majority."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dlock_core.backends.redis import health
from dlock_core.doctor.clocks import Timing, clock_spread
from dlock_core.doctor.finding import Finding, ok, unsafe, warning
from dlock_core.errors import BackendUnavailable

if TYPE_CHECKING:
    from dlock_core.backends.redlock.broadcast import RedlockNode
    from dlock_core.backends.redlock.nodes import NodeSet
    from dlock_core.runtime import Runtime

__all__ = ["diagnose"]


async def diagnose(nodes: NodeSet, runtime: Runtime) -> list[Finding]:
    """Examine every node, then all of them together; nodes that are down are findings."""
    measured = {node.title: await _measure(node, runtime) for node in nodes.all}
    reached = {title: each for title, each in measured.items() if not isinstance(each, BackendUnavailable)}
    found = [_majority(len(reached), len(nodes.all), nodes.needed)]
    if len(reached) > 1:
        found.append(clock_spread([timing for _, timing in reached.values()]))
    for title, each in measured.items():
        found += health.of_node(title, [_down(each)] if isinstance(each, BackendUnavailable) else _judge(*each))
    return found


async def _measure(node: RedlockNode, runtime: Runtime) -> tuple[Any, Timing] | BackendUnavailable:
    try:
        return await health.measure(node.backend, runtime)
    except BackendUnavailable as error:
        return error


def _majority(reached: int, of: int, needed: int) -> Finding:
    measured = f"{reached} of {of} nodes answer, {needed} are needed"
    if reached == of:
        return ok("majority", measured)
    remedy = "start the others; what each says is below"
    if reached < needed:
        return unsafe("majority", measured, "no lock can be taken, and leases run out", remedy)
    return warning("majority", measured, f"{reached - needed} more may fail before no lock can be taken", remedy)


def _down(error: BackendUnavailable) -> Finding:
    return warning("reach", error.reason, "it takes no part in majorities", "start it, or correct the address")


def _judge(info: Any, timing: Timing) -> list[Finding]:
    found = health.judge(info, timing)
    return [_failover(one) if one.check == "replication" and one.level == "warning" else one for one in found]


def _failover(one: Finding) -> Finding:
    reason = "a failover inside a node forgets leases behind the majority's back: two holders may be let in"
    return warning(one.check, one.measured, reason, "let a node that died stay away for a ttl, without a failover")
