"""`@locked("order", "order_id")`: hold a lock while a handler runs, and until the transaction of its session has ended.

The session's transaction keeps the lease, not the function, because a framework may commit after the response.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
import threading
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast, get_origin

from sqlalchemy.orm import Session, scoped_session
from sqlalchemy.util import ThreadLocalRegistry

from dlock_core.late import runs_async
from dlock_core.runtime import ASYNCIO, BLOCKING
from dlock_core.web.decorators import (
    LATE_WORK,
    Argument,
    NameTemplate,
    arg,
    finder,
    is_function,
    placeholders,
    refuse_bare,
)
from sqla_dlock.locks import alock, lock
from sqla_dlock.names import kind_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
    from typing import Never, Unpack

    from sqla_dlock.locks import AsyncLock, Lease, Lock, LockOptions

__all__ = ["Locked", "arg", "locked"]

F = TypeVar("F", bound="Callable[..., Any]")
T = TypeVar("T")

_SESSION = "dlock_session"


def locked(kind: Any, *arguments: Any, session: Any = None, **options: Unpack[LockOptions]) -> Locked:
    """Hold a lock while the function runs, and until the transaction of its session has ended.

    It decorates handlers of FastAPI, Starlette and Flask, tasks of Celery, methods and plain functions, below the
    decorators of the framework. Coroutine functions need an AsyncSession. What the session commits after the function
    has returned is still under the lease, in FastAPI even after the response.

    Args:
        kind: What is locked: a mapped class, or a text such as "order".
        arguments: The further parts of the name. A text names an argument of the function ("order_id"), or an attribute
            or item of it ("payload.order_id", "request.path_params.id"). A function is called with all arguments of the
            call and returns the part. Any other value is a part itself. With a class, each spelling of a key is one
            lock; with a text, name the type: `arg("order_id", int)`.
        session: The name of the argument that is the session; by default the only session among the arguments. Or a
            function that returns the session of the call, such as Flask-SQLAlchemy's `db.session`.
        options: Those of `lock`.

    Raises TypeError for an argument that the function does not have, as early as that can be known. A call without a
    session raises TypeError before the lock is requested. A value that cannot be a key raises NoSuchKey, which the
    middleware answers with 404. Text that comes unconverted from a URL, in Starlette and Flask, causes one
    RuntimeWarning.
    """
    refuse_bare(kind, is_model=kind_of(kind) is not None)
    return Locked((kind, *placeholders(arguments)), session, options)


class _NoDependency:
    """Refuses to be the signature of a decorator: FastAPI reads it, in `Depends(locked(...))`, while it is imported."""

    def __get__(self, decorator: Locked | None, kind: type[Locked]) -> Never:
        if decorator is None:
            raise AttributeError("__signature__")
        raise TypeError(
            "@locked itself is no dependency: write Depends(locked(...).dependency(get_session, order_id=int)), "
            "with the session dependency and the types of the endpoint"
        )


class Locked:
    """A decorator, and, by its method `dependency`, a dependency of FastAPI; see `locked`."""

    __signature__ = _NoDependency()

    def __init__(self, parts: tuple[Any, ...], session: Any, options: LockOptions) -> None:
        self._parts, self._session, self._options = parts, session, options
        self._wanted = [part for part in parts if isinstance(part, Argument)]
        lock(Session(), "kind", **options)  # raises now, while the module is imported, for wrong options
        for part in parts:
            if not isinstance(part, Argument) and not is_function(part):
                lock(Session(), part)

    def __call__(self, function: F) -> F:
        """Decorate a function."""
        LATE_WORK.refuse_function(function)
        name = NameTemplate(function, self._parts, kind_of, _from_url)
        session_of = self._session_finder(function)

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with name(functools.partial(self._lock, session_of(args, kwargs)), args, kwargs):
                return LATE_WORK.refuse_answer(function, function(*args, **kwargs), "decorate an async function")

        @functools.wraps(function)
        async def async_wrapper(*args: Any, **kwargs: Any) -> Any:
            async with name(functools.partial(self._alock, session_of(args, kwargs)), args, kwargs):
                return LATE_WORK.refuse_answer(function, await function(*args, **kwargs), "await it in the function")

        return cast("F", async_wrapper if runs_async(function) else wrapper)

    def dependency(self, session: Any, **types: Any) -> Callable[..., AsyncIterator[Any]]:
        """Return a dependency of FastAPI that yields the lease.

        For example: `Depends(locked("order", "order_id").dependency(get_session, order_id=int))`. A dependency that
        reads under the lock must depend on this one.

        Args:
            session: The application's own dependency, exactly as the endpoint has it: the function, the `Depends(...)`
                or the `Annotated[...]`.
            types: The type of each argument, the same as in the endpoint, so that "042" and "42" are one order. Types
                that `arg` has named need not be repeated.

        Raises TypeError for a missing or superfluous type, for parts that are functions, and, in the request, for a
        `scoped_session` of threads.
        """
        if any(map(is_function, self._parts)):
            raise TypeError(
                "dependency() does not see the call of the endpoint, which a function needs: decorate it instead"
            )
        wanted = {part.root for part in self._wanted}
        types = {part.root: part.kind for part in self._wanted if isinstance(part.kind, type)} | types
        if wanted != types.keys():
            raise TypeError(f"dependency() needs the type of each of {sorted(wanted)}, not of {sorted(types)}")

        async def dependency(**given: Any) -> AsyncIterator[Any]:
            own = given.pop(_SESSION)
            _refuse_thread_local(own)
            is_blocking = isinstance(own, Session | scoped_session)
            made = name(functools.partial(self._lock if is_blocking else self._alock, own), (), given)
            async with _in_threads(made) if is_blocking else made as lease:
                yield lease

        kinds = {**types, _SESSION: annotated(session)}
        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kinds[name]) for name in kinds]
        dependency.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        name = NameTemplate(dependency, self._parts, kind_of, _from_url)
        return dependency

    def _lock(self, session: Any, *values: Any) -> Lock:
        return lock(session, *values, **self._options)

    def _alock(self, session: Any, *values: Any) -> AsyncLock:
        return alock(session, *values, **self._options)

    def _session_finder(self, function: Callable[..., Any]) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
        given, title = self._session, getattr(function, "__qualname__", repr(function))
        if isinstance(given, str):
            return finder(function, given)
        if given is None:
            if inspect.signature(function).parameters.keys() <= {part.root for part in self._wanted}:
                raise TypeError(
                    f"@locked: {title} has no argument for a session: pass session= with a function that returns it"
                )
            return functools.partial(_session_among, title)
        if isinstance(given, type) or hasattr(given, "class_") or not callable(given):  # class_: of a sessionmaker
            raise TypeError(
                f"@locked: session={given!r} cannot return the session that {title} works with: "
                "name its argument, or pass a scoped_session or a function that returns the session of the call"
            )
        return lambda args, kwargs: given()


def _from_url(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """Yield the values that the router of Starlette or Flask took out of the URL of the request."""
    for each in (*args, *kwargs.values()):
        if hasattr(type(each), "path_params"):
            yield from each.path_params.values()
    flask = sys.modules.get("flask")
    if flask is not None and flask.has_request_context():
        yield from (flask.request.view_args or {}).values()


def _session_among(title: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    found = {id(each): each for each in (*args, *kwargs.values()) if isinstance(each, _kinds())}
    if len(found) != 1:
        raise TypeError(
            f"@locked: {title} was called with {len(found) or 'no'} session{'s'[: len(found)]} among its arguments: "
            "name the right one with session=, or pass a function that returns it"
        )
    return next(iter(found.values()))


def _kinds() -> tuple[type, ...]:
    """Return the classes of sessions; the async ones, which need greenlet, only if the program imported them."""
    asyncio = sys.modules.get("sqlalchemy.ext.asyncio")
    more = () if asyncio is None else (asyncio.AsyncSession, asyncio.async_scoped_session)
    return (Session, scoped_session, *more)


def annotated(session: Any) -> Any:
    """Return a dependency of FastAPI as an annotation."""
    from fastapi import Depends

    if get_origin(session) is Annotated:
        return session
    return Annotated[Any, Depends(session) if callable(session) else session]


def _refuse_thread_local(session: Any) -> None:
    """Raise TypeError for a registry that would give the lock another session than the endpoint."""
    if isinstance(session, scoped_session) and isinstance(session.registry, ThreadLocalRegistry):
        raise TypeError(
            "this scoped_session has a session for each thread, and the endpoint runs in another thread than its "
            "dependencies: let the session dependency yield the session itself, "
            "`with sessions() as session: yield session`"
        )


@asynccontextmanager
async def _in_threads(block: Lock) -> AsyncIterator[Lease]:
    """Enter and leave a block in a thread outside FastAPI's pool, in which waiters for this very lock may take all.

    A thread that waits for a lock cannot be stopped. A request that is cancelled during the wait ends without it, and
    the thread undoes the acquire at its end. That needs no event loop, which may be closed by then. But the request
    does not end while the thread uses its session: a session belongs to one thread at a time.
    """
    from anyio import CapacityLimiter, to_thread

    run = functools.partial(to_thread.run_sync, limiter=CapacityLimiter(1))
    turn, has_ended, entered = _Turn(), threading.Event(), list[Any]()
    acquire = block._new_acquire(BLOCKING)  # noqa: SLF001 - as `Lock.__enter__` does it
    if acquire.home is None:  # Otherwise the store is the session's own database.
        acquire.acquire_lease = turn.waiting(acquire.acquire_lease)  # type: ignore[method-assign]

    def begin(lease: Lease) -> None:
        entered.append(block._blocks.enter(threading.current_thread(), lease))  # noqa: SLF001 - as `Lock.__enter__` does it

    def enter() -> Any:
        try:
            turn.begin()
            return acquire.hold_in_thread(begin)
        finally:
            has_ended.set()

    async def leave(error: BaseException | None) -> None:
        await _to_its_end(run(block.__exit__, None, error, None))  # only the error is read

    try:
        lease = await run(enter, abandon_on_cancel=True)
    except BaseException as error:
        try:
            if not turn.end():
                await _to_its_end(run(has_ended.wait))
        finally:  # after another cancellation, too
            if entered:
                await leave(error)
        raise
    try:
        yield lease
    except BaseException as error:
        await leave(error)
        raise
    await leave(None)


class _Turn:
    """Decides between a request that is cancelled and its thread, so that only one of them uses the session."""

    def __init__(self) -> None:
        self._mutex, self._waits, self._is_over = threading.Lock(), True, False

    def end(self) -> bool:
        """End the request; return whether the thread has not begun or waits: it will not use the session any more."""
        with self._mutex:
            self._is_over = True
            return self._waits

    def begin(self) -> None:
        """Begin to use the session; raises CancelledError if the request has ended."""
        self._now(waits=False)

    def waiting(self, acquire: Callable[[], Coroutine[Any, Any, T]]) -> Callable[[], Coroutine[Any, Any, T]]:
        """Return the function that acquires a lease from the store, and fails at its end if the request is over."""

        async def acquire_lease() -> T:
            self._now(waits=True)
            try:
                return await acquire()
            finally:
                self._now(waits=False)

        return acquire_lease

    def _now(self, *, waits: bool) -> None:
        with self._mutex:
            self._waits = waits
            if self._is_over:
                raise asyncio.CancelledError


async def _to_its_end(call: Coroutine[Any, Any, object]) -> None:
    """Await a call, however often the task is cancelled: anyio shields only from anyio's own cancellation."""
    from anyio import CancelScope

    with CancelScope(shield=True):
        is_asyncio = asyncio._get_running_loop() is not None  # noqa: SLF001 - trio has no other cancellation than anyio's
        await (ASYNCIO.shield(call) if is_asyncio else call)
