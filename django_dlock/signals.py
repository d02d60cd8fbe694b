"""Django signals for the events of locks and versions; they cost nothing while no receiver is connected.

A receiver is called synchronously, in the thread of the event: it must be fast, and must not acquire locks or query the
database. What it raises is logged. The sender is `dlock_core.observability.hooks.Event`, and the named arguments are
those of an event: name, token, seconds, reason, contended.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final

from asgiref.sync import iscoroutinefunction
from django.dispatch import Signal

from dlock_core.late import runs_async
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

_subscription_lock = threading.RLock()  # A signal handler may also connect a receiver, in the middle.


class EventSignal(Signal):
    """A signal that is subscribed to the hooks as long as it has receivers."""

    def connect(self, receiver: Callable[..., Any], *args: Any, **options: Any) -> None:
        """Connect as Django does; raises TypeError for a coroutine function, which blocking code could not await."""
        if runs_async(receiver, iscoroutinefunction):
            raise TypeError(
                f"{receiver!r} is async, but lock signals are also sent from blocking code: connect a plain function"
            )
        super().connect(receiver, *args, **options)
        _update_subscription()

    def disconnect(self, *args: Any, **options: Any) -> bool:
        """Disconnect as Django does."""
        found: bool = super().disconnect(*args, **options)
        _update_subscription()
        return found


lock_acquired: Final = EventSignal()
"""A lease was granted; `seconds` is how long that took."""
lock_timed_out: Final = EventSignal()
"""An acquire failed because other holders kept the lock for the whole wait."""
store_unavailable: Final = EventSignal()
"""An acquire failed because its store did not answer."""
lock_released: Final = EventSignal()
"""A lease was released; `reason` is "released", or "expired" or "stolen" if it had ended before."""
lock_lost: Final = EventSignal()
"""A lease ended before it was released."""
lock_forced: Final = EventSignal()
"""An operator has released a lease from this process."""
write_refused: Final = EventSignal()
"""A version or the fence has refused a write or COMMIT; `reason` is the class of the error."""
work_retried: Final = EventSignal()
"""`retry_on_conflict` starts another attempt."""

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


def _update_subscription() -> None:
    with _subscription_lock:
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
