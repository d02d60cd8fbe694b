"""Django signals for what happens to locks and versions; they cost nothing while nobody is connected.

A receiver is called in the thread, and in the middle, of what it hears of: it must be quick and must not take locks or
query the database. What it raises is logged. Its named arguments are
those of `dlock_core.observability.hooks.Event`: name, token,
seconds, reason, contended. The sender is `Event`.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final

from asgiref.sync import iscoroutinefunction
from django.dispatch import Signal

from dlock_core.observability import hooks

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "lock_acquired",
    "lock_forced",
    "lock_lost",
    "lock_released",
    "lock_timed_out",
    "store_unavailable",
    "work_retried",
    "write_refused",
]

_guard = threading.Lock()


class EventSignal(Signal):
    """A signal that listens to the hooks as long as it has receivers."""

    def connect(self, receiver: Callable[..., Any], *args: Any, **options: Any) -> None:
        """As Django's; a coroutine function is a TypeError: nobody could await it in the middle of an acquire."""
        if iscoroutinefunction(receiver):
            raise TypeError(f"{receiver!r} is async: receivers of lock signals are called in blocking code, too")
        super().connect(receiver, *args, **options)
        _follow()

    def disconnect(self, *args: Any, **options: Any) -> bool:
        """As Django's."""
        found: bool = super().disconnect(*args, **options)
        _follow()
        return found


lock_acquired: Final = EventSignal()
"""A lease was granted; `seconds` is how long that took."""
lock_timed_out: Final = EventSignal()
"""Others held the lock for all of the wait."""
store_unavailable: Final = EventSignal()
"""An acquire failed because its store did not answer."""
lock_released: Final = EventSignal()
"""A lease ended by its release; `reason`: released, expired, stolen."""
lock_lost: Final = EventSignal()
"""A lease ended otherwise."""
lock_forced: Final = EventSignal()
"""An operator has ended a lease from this process."""
write_refused: Final = EventSignal()
"""A version or the fence refused a write or COMMIT; `reason` is the class of the error."""
work_retried: Final = EventSignal()
"""`retry_on_conflict` begins again."""

_SIGNALS: Final[dict[hooks.Kind, EventSignal]] = {
    "acquired": lock_acquired,
    "timeout": lock_timed_out,
    "unavailable": store_unavailable,
    "released": lock_released,
    "lost": lock_lost,
    "forced": lock_forced,
    "conflict": write_refused,
    "retry": work_retried,
}


def _follow() -> None:
    with _guard:
        hooks.unsubscribe(_send)
        if any(signal.has_listeners() for signal in _SIGNALS.values()):
            hooks.subscribe(_send)


def _send(event: hooks.Event) -> None:
    _SIGNALS[event.kind].send_robust(
        hooks.Event,
        name=event.name,
        token=event.token,
        seconds=event.seconds,
        reason=event.reason,
        contended=event.contended,
    )
