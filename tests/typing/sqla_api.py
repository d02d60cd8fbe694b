"""Never run, only type-checked, by mypy and by pyright: the public names of sqla_dlock as a user would write them."""

from __future__ import annotations

from typing import assert_type

from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker

from sqla_dlock import FencedMixin, alock, configure, lock
from sqla_dlock.leases import AsyncLease, Lease


class Base(DeclarativeBase):
    pass


class Stock(FencedMixin, Base):
    __tablename__ = "stock"

    id: Mapped[int] = mapped_column(primary_key=True)


def leases(session: Session, registry: scoped_session[Session]) -> None:
    configure(default="redis://localhost:6379/0", ledger="memory://")
    with lock(session, "order", 42, ttl=30, wait=None, shared=True, store="ledger") as lease:
        assert_type(lease, Lease)
        assert_type(lease.token, int)
        lease.ensure_held()
    assert_type(lock(registry, Stock, 42, fence="lease", bind=Stock).acquire(), Lease)


async def async_leases(session: AsyncSession) -> None:
    async with alock(session, "order", 42, wait=5.0) as lease:
        assert_type(lease, AsyncLease)
        await lease.renew(60)
    assert_type(await alock(session, Stock, 42).acquire(), AsyncLease)
