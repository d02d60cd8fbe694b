"""The options of a lock, checked before any I/O: times, switches, and the words of other libraries."""

from __future__ import annotations

import inspect
import math
from datetime import timedelta
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["check_callback", "check_switches", "unknown_option"]

_TTL: Final = "ttl= says how long a lease outlives a dead holder"
_WAIT: Final = "wait= says how long to wait for other holders"
_NO_POLLING: Final = "nothing is to be said: a waiter is woken, it does not ask again and again"
_OTHER_WORDS: Final = {
    "timeout": f"{_WAIT}, and {_TTL}",
    **dict.fromkeys(("blocking_timeout", "acquire_timeout", "lock_timeout", "wait_timeout", "max_wait"), _WAIT),
    **dict.fromkeys(("expire", "expires", "expiry", "expiration", "ex", "px", "lease", "lease_time", "duration"), _TTL),
    **dict.fromkeys(("blocking", "nowait", "non_blocking"), "wait=0 is one try, wait=None waits for ever"),
    **dict.fromkeys(("auto_renewal", "auto_renew", "auto_extend"), "renew=True is the default"),
    **dict.fromkeys(("sleep", "interval", "retry_delay", "retry_interval", "poll_interval"), _NO_POLLING),
    **dict.fromkeys(("exclusive", "read", "readonly", "mode"), "shared=True lets other shared holders in"),
    **dict.fromkeys(("database", "db", "alias"), "using= names the database in Django, bind= gives it in SQLAlchemy"),
    **dict.fromkeys(("backend", "connection", "client", "redis"), "store= names a store of the configuration"),
    "callback": "on_lost= is called when the lease is lost",
}


def check_switches(**given: object) -> None:
    """Raise TypeError for an option that is neither True nor False, as `renew=60.0` and `shared="no"` are."""
    for name, value in given.items():
        if value is not True and value is not False:
            raise TypeError(f"{name} is True or False, not {type(value).__name__}: {value!r:.80}")


def check_callback(name: str, value: object) -> None:
    """Raise TypeError for what cannot be called, and for a coroutine function, which would never be awaited."""
    if value is None:
        return
    if not callable(value):
        raise TypeError(f"{name} is a function without arguments or None, not {type(value).__name__}: {value!r:.80}")
    if inspect.iscoroutinefunction(value):
        raise TypeError(f"{name} is called from another thread, where nobody awaits it: give a plain function")


def unknown_option(names: Iterable[str], known: Iterable[str]) -> TypeError:
    """Return an error that says what an option is called here which other libraries know by another name."""
    name = next(iter(names))
    instead = f"; {_OTHER_WORDS[name]}" if name in _OTHER_WORDS else ""
    return TypeError(f"a lock has no option {name!r}{instead}. Its options: {', '.join(known)}")


Seconds = float | int | timedelta

MAX_TTL_S: Final = 366 * 86400.0


def ttl_seconds(ttl: Seconds) -> float:
    """Return a checked ttl in seconds: finite, greater than 0, at most a year; renewal makes a lease last longer."""
    seconds = _number("ttl", ttl)
    if not 0 < seconds <= MAX_TTL_S:
        raise ValueError(f"ttl must be more than 0 and at most {MAX_TTL_S:.0f} seconds, not {ttl!r}")
    return seconds


def wait_seconds(wait: Seconds | None) -> float | None:
    """Return a checked wait in seconds: None is for ever, 0 is one try, else finite seconds."""
    if wait is None:
        return None
    seconds = _number("wait", wait)
    if not 0 <= seconds < math.inf:
        raise ValueError(f"wait must be None (for ever), 0 (one try) or a finite number of seconds, not {wait!r}")
    return seconds


def deadline(now: float, wait: float | None) -> float:
    """Return the moment at which a wait that starts now is over; `math.inf` for a wait without end."""
    return math.inf if wait is None else now + wait


def _number(what: str, value: object) -> float:
    if type(value) is float:
        return value
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{what} is seconds (int or float) or a timedelta, not {type(value).__name__}: {value!r:.80}")
    try:
        return float(value)
    except OverflowError:
        return math.inf
