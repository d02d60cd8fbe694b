"""`@locked("order", "order_id")`: handler → lease → work → COMMIT → release, wherever the session's COMMIT is.

It is the transaction of the session that keeps the lease, not the function: a framework may commit after the response.
"""

from __future__ import annotations

import functools
import inspect
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast, get_origin

from sqlalchemy.orm import Session, scoped_session

from dlock_core.web.decorators import (
    Argument,
    NameTemplate,
    arg,
    finder,
    is_function,
    placeholders,
    refuse_bare,
    refuse_coroutine,
    refuse_late,
)
from sqla_dlock.locks import lock
from sqla_dlock.names import kind_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from typing import Unpack

    from sqla_dlock.async_locks import AsyncLock
    from sqla_dlock.locks import Lease, Lock, LockOptions

__all__ = ["Locked", "arg", "locked"]

F = TypeVar("F", bound="Callable[..., Any]")

_SESSION = "dlock_session"


def locked(kind: Any, *arguments: Any, session: Any = None, **options: Unpack[LockOptions]) -> Locked:
    """Hold a lock while the function runs, and until the transaction of its session has ended.

    `kind` is what is locked: a mapped class, or a text such as "order". Every further part names an argument of the
    function ("order_id"; "order.id" and "request.path_params.id" for an attribute or item of it), or is a function that
    is called with all arguments of the call and returns the part, or is a value that is no text. With a class every
    spelling of a key is one lock; with a text say the type: `arg("order_id", int)`. What cannot be such a key is a
    NoSuchKey, which the middleware answers with 404. A text that comes out of the URL as it is, in Starlette and Flask,
    gives a RuntimeWarning, once.
    `session`: the name of the argument that is the session (without it, the only session among the arguments), or what
    gives the session of the call, such as Flask-SQLAlchemy's `db.session`. Other options are those of `lock`. For
    handlers of FastAPI, Starlette and Flask, tasks of Celery (below the decorators of the framework), methods and plain
    functions; async ones need an AsyncSession.

    What the session commits after the function returned is still under the lease, in FastAPI also after the response.

    Raises TypeError for an argument that the function does not have, where that can be known before it is called; a
    call without a session is a TypeError before the lock is asked for.
    """
    refuse_bare(kind, is_model=kind_of(kind) is not None)
    return Locked((kind, *placeholders(arguments)), session, options)


class Locked:
    """A decorator, and a dependency of FastAPI; see `locked`."""

    def __init__(self, parts: tuple[Any, ...], session: Any, options: LockOptions) -> None:
        self._parts, self._session, self._options = parts, session, options
        self._wanted = [part for part in parts if isinstance(part, Argument)]
        lock(Session(), "kind", **options)  # shows mistakes
        for part in parts:
            if not isinstance(part, Argument) and not is_function(part):
                lock(Session(), part)

    def __call__(self, function: F) -> F:
        """Decorate a function."""
        refuse_late(function)
        name = NameTemplate(function, self._parts, kind_of, _from_url)
        session_of = self._session_finder(function)

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with name(functools.partial(self._lock, session_of(args, kwargs)), args, kwargs):
                return refuse_coroutine(function, function(*args, **kwargs), "decorate an async function")

        @functools.wraps(function)
        async def async_wrapper(*args: Any, **kwargs: Any) -> Any:
            async with name(functools.partial(self._alock, session_of(args, kwargs)), args, kwargs):
                return await function(*args, **kwargs)

        return cast("F", async_wrapper if inspect.iscoroutinefunction(function) else wrapper)

    def dependency(self, session: Any, **types: Any) -> Callable[..., AsyncIterator[Any]]:
        """Make a dependency of FastAPI that gives the lease; what reads under it has to depend on it.

        `session` is the application's own dependency, exactly as the endpoint has it: its function, its `Depends(...)`
        or its `Annotated[...]`. `types` tell for every argument what the endpoint has, too, so that "042" and "42" are
        the same order: `Depends(locked("order", "order_id").dependency(get_session, order_id=int))`. Those that `arg`
        tells need not be told again.
        """
        if any(map(is_function, self._parts)):
            raise TypeError("dependency() does not see the call of the endpoint, which a function needs: decorate it")
        wanted = {part.root for part in self._wanted}
        types = {part.root: part.kind for part in self._wanted if isinstance(part.kind, type)} | types
        if wanted != types.keys():
            raise TypeError(f"dependency() needs the type of each of {sorted(wanted)}, not of {sorted(types)}")

        async def dependency(**given: Any) -> AsyncIterator[Any]:
            own = given.pop(_SESSION)
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
        from sqla_dlock.async_locks import alock  # needs greenlet, which a Flask application may not have

        return alock(session, *values, **self._options)

    def _session_finder(self, function: Callable[..., Any]) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
        given, title = self._session, getattr(function, "__qualname__", repr(function))
        if isinstance(given, str):
            return functools.partial(finder(function, [given]), given)
        if given is None:
            if inspect.signature(function).parameters.keys() <= {part.root for part in self._wanted}:
                raise TypeError(f"@locked: {title} has no argument for a session: tell session=what_gives_it")
            return functools.partial(_session_among, title)
        if isinstance(given, type) or hasattr(given, "class_") or not callable(given):  # class_: of a sessionmaker
            raise TypeError(
                f"@locked: session={given!r} is not what gives the session that {title} works with: "
                "name its argument, or give a scoped_session or a function that returns the session of the call"
            )
        return lambda args, kwargs: given()


def _from_url(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """Give what the router of Starlette or Flask took out of the URL of the request."""
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
            "tell by session= the name of the right one, or what gives it"
        )
    return next(iter(found.values()))


def _kinds() -> tuple[type, ...]:
    """Whoever has an AsyncSession has imported it, and has the greenlet that it needs."""
    asyncio = sys.modules.get("sqlalchemy.ext.asyncio")
    more = () if asyncio is None else (asyncio.AsyncSession, asyncio.async_scoped_session)
    return (Session, scoped_session, *more)


def annotated(session: Any) -> Any:
    """Write a dependency as an annotation."""
    from fastapi import Depends

    if get_origin(session) is Annotated:
        return session
    return Annotated[Any, Depends(session) if callable(session) else session]


@asynccontextmanager
async def _in_threads(block: Lock) -> AsyncIterator[Lease]:
    """Enter and leave a block in threads of its own: those of the pool may all be taken, by those who wait for it."""
    from anyio import CancelScope, CapacityLimiter, to_thread

    run = functools.partial(to_thread.run_sync, limiter=CapacityLimiter(1))
    lease = await run(block.__enter__)
    try:
        yield lease
    except BaseException as error:
        with CancelScope(shield=True):
            await run(block.__exit__, type(error), error, error.__traceback__)
        raise
    with CancelScope(shield=True):
        await run(block.__exit__, None, None, None)
