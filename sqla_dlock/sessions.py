"""Which session was meant: itself, or the one of a `scoped_session`; the other kind is a TypeError before any I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.orm import Session, scoped_session

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session

__all__ = ["plain_async_session", "plain_session", "refuse_closed"]


def plain_session(session: Session | scoped_session[Any], instead: str) -> Session:
    """Give the Session; `instead` is what to call with an AsyncSession."""
    found: Any = session() if isinstance(session, scoped_session) else session
    if isinstance(found, Session):
        return found
    is_async = type(found).__module__.startswith("sqlalchemy.ext.asyncio") or hasattr(found, "sync_session")
    hint = f": use {instead}" if is_async else ""
    raise TypeError(f"a Session is needed here, not {type(found).__name__}{hint}")


def plain_async_session(session: AsyncSession | async_scoped_session[Any], instead: str) -> AsyncSession:
    """Give the AsyncSession; `instead` is what to call with a Session."""
    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session  # needs greenlet, which is not everywhere

    found: Any = session() if isinstance(session, async_scoped_session) else session
    if isinstance(found, AsyncSession):
        return found
    hint = f": use {instead}" if isinstance(found, Session | scoped_session) else ""
    raise TypeError(f"an AsyncSession is needed here, not {type(found).__name__}{hint}")


def refuse_closed(session: Session) -> None:
    """Raise InvalidRequestError for a session that was closed for good (`close_resets_only=False`)."""
    if getattr(session._close_state, "name", "") == "CLOSED":  # nothing public tells; it begins no transaction any more
        raise InvalidRequestError("this Session has been closed for good: take the lock with a new one")
