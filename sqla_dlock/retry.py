"""`retry_on_conflict`: repeat the whole work, in a new session, if another transaction was faster."""

from __future__ import annotations

import inspect
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, Protocol, TypeVar, cast, overload

from sqlalchemy import Connection
from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.orm import Session

from dlock_core.late import runs_async
from dlock_core.transactions.retry import (
    ATTEMPTS,
    WITHIN_S,
    Policy,
    check_answer,
    check_function,
    claim_databases,
    is_retry,
    with_retry,
)
from sqla_dlock import transactions as _listeners  # noqa: F401 - they report transactions to the attempts

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

    from sqlalchemy.ext.asyncio import AsyncSession

    from dlock_core.options import Seconds

__all__ = ["is_retry", "retry_on_conflict"]

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound="Session | AsyncSession")
S_co = TypeVar("S_co", bound="Session | AsyncSession", covariant=True)


_FOREIGN: Final = (
    "retry_on_conflict needs to begin a transaction and one is already open: {}; what it has read would not be read "
    "again, so call the function outside of it"
)


_NESTED: Final = (
    "retry_on_conflict inside another one on the same database, which would repeat what this one commits: decorate "
    "only the outer function, and pass its session on"
)


class WithSession(Protocol[S_co]):
    """Decorates a function or method, whose callers no longer pass its session."""

    @overload
    def __call__(self, function: Callable[Concatenate[S_co, P], T], /) -> Callable[P, T]: ...
    @overload
    def __call__(self, method: Callable[Concatenate[Any, S_co, P], T], /) -> Callable[Concatenate[Any, P], T]: ...


def retry_on_conflict(
    session_factory: Callable[[], S], *, attempts: int = ATTEMPTS, within: Seconds | None = WITHIN_S
) -> WithSession[S]:
    """Decorate a function to run in a transaction of a new session, and to run again from the start after a conflict.

    `session_factory` creates the session, which the function gets as its first argument (a method after `self`) and
    which its callers do not pass: a `sessionmaker`; for a coroutine function an `async_sessionmaker`. With a
    `scoped_session`, the new session is the current one while the function runs. The session is committed when the
    function returns, and closed: return values rather than instances, which are detached then, and expired unless the
    factory has `expire_on_commit=False`.

    A conflict is StaleObject, StaleDataError, StaleToken, RowLocked, a deadlock, a serialization failure or a lock
    timeout, including those in COMMIT. The pauses between runs have full jitter. There are at most `attempts` runs,
    none of which starts later than `within` seconds after the first; then the last conflict is raised, with a note of
    the number of runs. Any other error, and a cancellation, is raised at once. To wait in the row's queue from the
    second run on, lock the row if `is_retry()`.

    The function runs again only if everything that the run did is known to be rolled back. A conflict is raised at
    once, with a note, if work of this session, or of another whose transaction began in the function, is or may be
    committed: also by AUTOCOMMIT, or by DDL on MySQL and MariaDB. Commits of a Connection without a session, the text
    COMMIT, what a procedure or a prepared statement commits, and what in AUTOCOMMIT a SELECT's function or the trigger
    of an UPDATE of no rows has written, are not detected.

    Raises InvalidRequestError if the function swallows an error that has undone its transaction: on PostgreSQL any
    error outside of a savepoint, on MySQL and MariaDB a deadlock, even in a savepoint. The work before the error would
    not be committed, while the work after it would be.

    Raises InvalidRequestError, before the function runs, inside another `retry_on_conflict` of the same engine, and if
    a transaction is already open: of a session among the arguments, of the current session of a `scoped_session`, of
    the connection that the session is bound to (unless `join_transaction_mode="create_savepoint"`, as in test suites).
    """
    policy = Policy(attempts=attempts, within=within)
    _refuse_no_factory(session_factory)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        check_function(function)
        position, signature = _without_session(function)
        is_async = runs_async(function)
        attempt = _attempt_of_coroutine if is_async else _attempt_of_function
        once = partial(attempt, function, position, session_factory)
        wrapped = with_retry(function, policy, once, is_async=is_async)
        wrapped.__signature__ = signature  # type: ignore[attr-defined]
        return wrapped

    return cast("WithSession[S]", decorate)


def _attempt_of_function(
    function: Callable[..., Any], position: int, factory: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    _refuse_given(args, kwargs)
    with _current(factory) as session, _own(session, Session), session.begin():
        return check_answer(function, function(*args[:position], session, *args[position:], **kwargs))


async def _attempt_of_coroutine(
    function: Callable[..., Any], position: int, factory: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    from sqlalchemy.ext.asyncio import AsyncSession  # needs greenlet, which is not everywhere

    _refuse_given(args, kwargs)
    with _current(factory) as session:
        async with _own(session, AsyncSession), session.begin():
            answer = await function(*args[:position], session, *args[position:], **kwargs)
            return check_answer(function, answer)


@contextmanager
def _current(factory: Any) -> Iterator[Any]:
    """Create a session, and make it the current one if the factory has a current session."""
    registry = getattr(factory, "registry", None)
    if registry is None:
        yield factory()
        return
    former = registry() if registry.has() else None
    if former is not None and former.in_transaction():
        raise InvalidRequestError(_FOREIGN.format("the current session of the scoped session has one"))
    registry.set(session := factory.session_factory())
    try:
        yield session
    finally:
        registry.set(former) if former is not None else registry.clear()


def _own(session: Any, kind: Any) -> Any:
    """Return the session if it has the right class and can begin and end a transaction by itself."""
    if not isinstance(session, kind):
        raise TypeError(
            f"the session factory made {type(session).__name__}, not {kind.__name__}: "
            "give a sessionmaker to a function, an async_sessionmaker to a coroutine function"
        )
    own: Session = getattr(session, "sync_session", session)
    if own.in_transaction():
        raise InvalidRequestError(_FOREIGN.format("the session that the factory made has one"))
    bind, joins = own.bind, own.join_transaction_mode != "create_savepoint"
    if isinstance(bind, Connection) and bind.in_transaction() and joins:
        raise InvalidRequestError(_FOREIGN.format("the connection that the session is bound to has one"))
    if not claim_databases(_pools(own)):
        raise InvalidRequestError(_NESTED)
    return session


def _pools(session: Session) -> frozenset[Hashable]:
    """Return the pools that identify a session's database; none if it chooses one for each statement."""
    if session.bind is None or type(session).get_bind is not Session.get_bind:
        return frozenset()
    return frozenset([session.bind.engine.pool])


def _refuse_given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for given in (*args, *kwargs.values()):
        is_session = isinstance(given, Session) or hasattr(given, "sync_session")
        if is_session and given.in_transaction():
            raise InvalidRequestError(_FOREIGN.format("a session among the arguments has one"))


def _refuse_no_factory(factory: Any) -> None:
    is_session = isinstance(factory, Session) or hasattr(factory, "sync_session")
    if is_session or not callable(factory) or runs_async(factory):
        raise TypeError(f"retry_on_conflict() needs a factory of a new session for every run, not {factory!r:.80}")
    try:
        with suppress(ValueError):  # functions written in C have no signature
            inspect.signature(factory).bind()
    except TypeError as error:
        raise TypeError(f"retry_on_conflict() calls its session factory without arguments: {error}") from None


def _without_session(function: Callable[..., Any]) -> tuple[int, inspect.Signature]:
    """Return the position of the session among the arguments, and the signature without it, for callers."""
    signature = inspect.signature(function)
    names = list(signature.parameters)
    position = 1 if names[:1] in (["self"], ["cls"]) else 0
    parameters = list(signature.parameters.values())
    by_name_only = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    if len(names) <= position or parameters[position].kind in by_name_only:
        raise TypeError(f"{function!r} has no argument for the session, which is passed first")
    if parameters[position].kind is not inspect.Parameter.VAR_POSITIONAL:
        del parameters[position]
    return position, signature.replace(parameters=parameters)
