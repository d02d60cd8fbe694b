"""Never run, only type-checked: row locks and retry of `sqla_dlock` as a user would write them."""

from __future__ import annotations

from typing import assert_type

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker

from sqla_dlock.retry import retry_on_conflict
from sqla_dlock.rows import alock_row, alock_rows, lock_row, lock_rows


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "order"

    id: Mapped[int] = mapped_column(primary_key=True)


Maker = sessionmaker()
AsyncMaker = async_sessionmaker()


@retry_on_conflict(Maker, attempts=3, within=2.5)
def ship(session: Session, order_id: int, *, fast: bool = False) -> str:
    order = lock_row(session, Order, order_id, shared=True, wait=2)
    assert_type(order, Order)
    assert_type(lock_row(session, order, no_key=False), Order)
    assert_type(lock_row(session, order, skip_locked=True), Order | None)
    assert_type(lock_row(session, Order, order_id, skip_locked=True), Order | None)
    assert_type(lock_rows(session, Order, [1, 2], nowait=True), list[Order])
    lock_rows(session, select(Order).limit(10), skip_locked=True)
    lock_row(session, Order, order_id, no_wait=True)  # type: ignore[call-overload]
    return "shipped"


@retry_on_conflict(AsyncMaker)
async def aship(session: AsyncSession, order_id: int) -> str:
    assert_type(await alock_row(session, Order, order_id), Order)
    assert_type(await alock_row(session, Order, order_id, skip_locked=True), Order | None)
    assert_type(await alock_rows(session, Order, [1]), list[Order])
    return "shipped"


class Service:
    @retry_on_conflict(scoped_session(Maker))
    def ship(self, session: Session, order_id: int) -> str:
        return "shipped"


async def use() -> None:
    assert_type(ship(1, fast=True), str)
    assert_type(await aship(1), str)
    assert_type(Service().ship(1), str)
    ship("1")  # type: ignore[arg-type]
    Service().ship("1")  # type: ignore[arg-type]


@retry_on_conflict(AsyncMaker)  # type: ignore[arg-type]
async def of_the_other_kind(session: Session, order_id: int) -> None: ...
