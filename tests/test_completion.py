"""What an editor offers after a dot is a reviewed list, without the internal steps of the protocol.

A change of one of these lists is also one of the reference and the changelog.
"""

from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

import dlock_core
import sqla_dlock
from django_dlock import lock
from django_dlock.locks import Lease as DjangoLease
from django_dlock.locks import Leases as DjangoLeases
from dlock_core.testing import MemoryBackend
from sqla_dlock import alock
from sqla_dlock.locks import AsyncLease, AsyncLeases, Lease, Leases

OPTIONS = "fair fence name on_lost reentrant renew shared snapshot store ttl wait"
CORE_OPTIONS = "backend fair name on_lost reentrant renew shared ttl wait"
FACTS = "ensure_held holder lost name remaining shared token"
GROUP = "count ensure_held index lost release remaining"  # `count` and `index` are those of a tuple


def of_a_session(*parts: str) -> Any:
    return sqla_dlock.lock(Session(), *parts)


def of_an_async_session(*parts: str) -> Any:
    return alock(AsyncSession(), *parts)


PUBLIC = [
    (dlock_core.Lock(MemoryBackend(), "a"), f"acquire try_acquire {CORE_OPTIONS}"),
    (dlock_core.AsyncLock(MemoryBackend(), "a"), f"acquire try_acquire {CORE_OPTIONS}"),
    (dlock_core.MultiLock(MemoryBackend(), ["a"]), "acquire backend fair names on_lost renew shared ttl wait"),
    (dlock_core.AsyncMultiLock(MemoryBackend(), ["a"]), "acquire backend fair names on_lost renew shared ttl wait"),
    (dlock_core.Lease, f"{FACTS} release renew"),
    (dlock_core.AsyncLease, f"{FACTS} release renew"),
    (dlock_core.MultiLease([]), f"{GROUP} leases"),
    (dlock_core.AsyncMultiLease([]), f"{GROUP} leases"),
    (lock("a"), f"aacquire acquire using {OPTIONS}"),
    (lock(lock("a"), lock("b")), "aacquire acquire locks wait"),
    (DjangoLease, f"{FACTS} release arelease renew arenew"),
    (DjangoLeases, f"{GROUP} arelease"),
    (of_a_session("a"), f"acquire bind session {OPTIONS}"),
    (sqla_dlock.lock(of_a_session("a"), of_a_session("b")), "acquire locks wait"),
    (Lease, f"{FACTS} release renew"),
    (Leases, GROUP),
    (of_an_async_session("a"), f"acquire bind session {OPTIONS}"),
    (alock(of_an_async_session("a"), of_an_async_session("b")), "acquire locks wait"),
    (AsyncLease, f"{FACTS} release renew"),
    (AsyncLeases, GROUP),
]


@pytest.mark.parametrize(
    ("thing", "names"), PUBLIC, ids=lambda each: getattr(each, "__qualname__", type(each).__qualname__)
)
def test_no_step_of_the_protocol_is_offered_as_if_it_were_to_be_called(thing: object, names: str) -> None:
    assert [name for name in dir(thing) if not name.startswith("_")] == sorted(names.split())
