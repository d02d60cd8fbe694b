"""`retry_on_conflict`: do the whole work again, in a new transaction, when somebody else was faster."""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from asgiref.sync import iscoroutinefunction
from django.db import transaction
from django.db.transaction import TransactionManagementError

from django_dlock.transactions import in_transaction
from dlock_core.retry import Policy, retry
from dlock_core.runtime import ASYNCIO, BLOCKING, run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dlock_core.deadline import Seconds

__all__ = ["retry_on_conflict"]

P = ParamSpec("P")
T = TypeVar("T")


def retry_on_conflict(
    *, attempts: int = 5, within: Seconds | None = None, using: str | Iterable[str] = "default"
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function to run in a transaction of its own, and to run again from the start after a conflict.

    A conflict is StaleObject, StaleToken, RowLocked, a deadlock, a serialization failure or a lock timeout. Between
    runs it pauses with full jitter. At most `attempts` runs, none of which starts later than `within` seconds after
    the first; then the last conflict is raised, with a note of how many there were. Any other error, and a
    cancellation, is raised at once.

    `using` names the database, or several. Raises TransactionManagementError when a transaction is already open on one
    of them: what it has read before would not be read again. Put side effects into `transaction.on_commit`.

    A coroutine function is just run again: no transaction can be opened around a coroutine, so open them in the
    functions that it gives to `sync_to_async`.
    """
    policy = Policy(attempts=attempts, within=within)
    aliases = (using,) if isinstance(using, str) else tuple(using)

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(f"{function.__qualname__} is a generator: what it has yielded cannot be taken back")
        wrap = _for_coroutines if iscoroutinefunction(function) else _for_functions
        return cast("Callable[P, T]", wrap(function, policy, aliases))

    return decorate


def _for_functions(function: Callable[..., Any], policy: Policy, aliases: tuple[str, ...]) -> Callable[..., Any]:
    @wraps(function)
    def in_new_transaction(*args: Any, **kwargs: Any) -> Any:
        _refuse_transactions(aliases)

        async def attempt() -> Any:
            with ExitStack() as transactions:
                for alias in aliases:
                    transactions.enter_context(transaction.atomic(using=alias, durable=True))
                return function(*args, **kwargs)

        return run(retry(BLOCKING, attempt, policy))

    return in_new_transaction


def _for_coroutines(function: Callable[..., Any], policy: Policy, _: tuple[str, ...]) -> Callable[..., Any]:
    @wraps(function)
    async def again(*args: Any, **kwargs: Any) -> Any:
        return await retry(ASYNCIO, lambda: function(*args, **kwargs), policy)

    return again


def _refuse_transactions(aliases: tuple[str, ...]) -> None:
    for alias in aliases:
        if in_transaction(alias):
            raise TransactionManagementError(
                f"retry_on_conflict needs to begin a transaction on {alias!r}, and one is already open here: "
                "call the function outside of it (a view under ATOMIC_REQUESTS: decorate it with non_atomic_requests)"
            )
