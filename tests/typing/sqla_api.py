"""This module is only type-checked, by mypy and pyright, never run: it uses the names of sqla_dlock as a user would."""

from __future__ import annotations

from typing import Annotated, assert_type

from fastapi import Depends, FastAPI
from flask import Flask
from sqlalchemy import Engine, MetaData, Table, select
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker
from starlette.applications import Starlette
from starlette.middleware import Middleware

from dlock_core import DLockError, Released, StaleObject, connect
from dlock_core.stores import Store
from sqla_dlock import (
    FencedMixin,
    VersionedMixin,
    adelete_with_version,
    alock,
    alock_row,
    alock_rows,
    asave_with_version,
    atouch,
    configure,
    delete_with_version,
    fencing,
    lock,
    lock_row,
    lock_rows,
    locked,
    retry_on_conflict,
    save_with_version,
    touch,
)
from sqla_dlock.locks import AsyncLease, Lease
from sqla_dlock.middleware import LockMiddleware, WSGILockMiddleware, answer_asgi, answer_flask


class Base(DeclarativeBase):
    pass


class Stock(FencedMixin, Base):
    __tablename__ = "stock"

    id: Mapped[int] = mapped_column(primary_key=True)


class Order(VersionedMixin, Base):
    __tablename__ = "order"
    __version_children__ = ("lines",)

    id: Mapped[int] = mapped_column(primary_key=True)


Maker = sessionmaker()
AsyncMaker = async_sessionmaker()


# Leases


def leases(session: Session, registry: scoped_session[Session], engine: Engine) -> None:
    configure(default="redis://localhost:6379/0", ledger=Store("ledger", connect("memory://"), ttl=60, wait=None))
    with lock(session, "order", 42, ttl=30, wait=None, shared=True, store="ledger") as lease:
        assert_type(lease, Lease)
        assert_type(lease.token, int)
        assert_type(lease.remaining(), float)
        lease.ensure_held()
        lease.renew(60)
        assert_type(lease.release(), Released | None)
    assert_type(lock(registry, Stock, 42, fence="lease", bind=Stock).acquire(), Lease)
    lock(session, "order", 42, bind=engine, snapshot="ignore", reentrant=True, renew=False, fair=False, on_lost=print)
    lock(session, "order", 42, store=connect("memory://"))
    lock(session, "order", 42, waits=1)  # type: ignore[call-overload]
    lock(session, "order", 42, fence="both")  # type: ignore[call-overload]
    assert_type(fencing.metadata, MetaData)
    assert_type(fencing.table, Table)
    fencing.metadata.create_all(engine)


async def async_leases(
    session: AsyncSession, registry: async_scoped_session[AsyncSession], engine: AsyncEngine
) -> None:
    async with alock(session, "order", 42, wait=5.0, bind=engine) as lease:
        assert_type(lease, AsyncLease)
        await lease.renew(60)
        assert_type(await lease.release(), Released | None)
    assert_type(await alock(registry, Stock, 42).acquire(), AsyncLease)


# Row locks


def rows(session: Session, registry: scoped_session[Session], order: Order) -> None:
    assert_type(lock_row(session, Order, 42, shared=True, key=True, wait=2), Order)
    assert_type(lock_row(registry, order, no_key=False), Order)
    assert_type(lock_row(session, order, skip_locked=True), Order | None)
    assert_type(lock_row(session, Order, 42, skip_locked=True), Order | None)
    assert_type(lock_rows(session, Order, [1, 2], nowait=True), list[Order])
    lock_rows(session, select(Order).limit(10), skip_locked=True)
    lock_row(session, Order, 42, no_wait=True)  # type: ignore[call-overload]


async def async_rows(session: AsyncSession) -> None:
    assert_type(await alock_row(session, Order, 42), Order)
    assert_type(await alock_row(session, Order, 42, skip_locked=True), Order | None)
    assert_type(await alock_rows(session, Order, [1]), list[Order])


# Versions


def versions(session: Session, registry: scoped_session[Session], order: Order) -> None:
    assert_type(order.version, int)
    try:
        save_with_version(session, order, expected=3)
    except StaleObject as error:
        raise LookupError(error.found) from error
    touch(session, order)
    delete_with_version(registry, order)
    save_with_version(AsyncMaker(), order)  # type: ignore[arg-type]


async def async_versions(session: AsyncSession, order: Order) -> None:
    await asave_with_version(session, order, expected=3)
    await atouch(session, order)
    await adelete_with_version(session, order)


# Retry


@retry_on_conflict(Maker, attempts=3, within=2.5)
def ship(session: Session, order_id: int, *, fast: bool = False) -> str:
    return "shipped"


@retry_on_conflict(AsyncMaker)
async def aship(session: AsyncSession, order_id: int) -> str:
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


# Handlers


def get_session() -> Session:
    return Maker()


SessionDep = Annotated[Session, Depends(get_session, scope="function")]
one_at_a_time = locked("order", "order_id").dependency(SessionDep, order_id=int)

app = FastAPI()
app.add_middleware(LockMiddleware)
app.add_exception_handler(DLockError, answer_asgi)
site = Starlette(middleware=[Middleware(LockMiddleware)])


@app.post("/orders/{order_id}/ship")
@locked("order", "order_id", wait=5)
def ship_order(order_id: int, session: SessionDep) -> str:
    return "shipped"


@app.post("/orders/{order_id}/cancel")
async def cancel(order_id: int, lease: Annotated[Lease, Depends(one_at_a_time, scope="function")]) -> str:
    assert_type(lease.token, int)
    return "cancelled"


@locked(Order, "order.id", session="self.session", shared=True)
async def show(self: object, order: Order) -> str:
    return "shown"


locked("order", "order_id", colour="red")  # type: ignore[call-arg]

db = scoped_session(Maker)
flask = Flask("shop")
flask.wsgi_app = WSGILockMiddleware(flask.wsgi_app)  # type: ignore[method-assign]
flask.register_error_handler(DLockError, answer_flask)


@flask.post("/orders/<int:order_id>/pack")
@locked("order", "order_id", session=db)
def pack(order_id: int) -> str:
    return "packed"


def decorated(session: Session) -> None:
    assert_type(ship_order(42, session), str)
    assert_type(pack(42), str)
