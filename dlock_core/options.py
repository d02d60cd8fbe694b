"""The options of locks and of stores, checked before any I/O.

The options of a lock are one value, which every kind of lock creates once and passes on. A store's URL may contain a
password; the functions that check for one are also in this module.
"""

from __future__ import annotations

import inspect
import math
import re
from datetime import timedelta
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol
from urllib.parse import unquote

from dlock_core.late import runs_later

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = [
    "NOT_GIVEN", "LockOptions", "NotGiven", "Seconds", "check_callback", "check_flags", "check_seconds",
    "check_switches", "checked_prefix", "deadline", "has_swallowed_options", "masked", "store_ttl", "tells_secret",
    "ttl_seconds", "unknown_option", "unknown_store_option", "wait_seconds",
]  # fmt: skip

Seconds = float | int | timedelta


class NotGiven(Enum):
    """The type of NOT_GIVEN."""

    NOT_GIVEN = "NOT_GIVEN"

    def __repr__(self) -> str:
        return self.name


NOT_GIVEN: Final = NotGiven.NOT_GIVEN
"""The default of an argument for which None is a mistake."""

MAX_TTL_S: Final = 366 * 86400.0
"""The longest ttl; renewal makes a lease last longer."""
MAX_STORE_TIME_S: Final = 86400.0
"""The longest time limit of a store's requests."""
MAX_PREFIX_LENGTH: Final = 512
"""The longest prefix of a store's keys, in characters."""

_TTL: Final = "ttl= says how long a lease outlives a dead holder"
_WAIT: Final = "wait= says how long to wait for other holders"
_NO_POLLING: Final = "no option is needed: a waiter is woken, it does not poll"
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


class _Capabilities(Protocol):
    """The capabilities that matter for options: see `dlock_core.backend.Capabilities`."""

    @property
    def ttl_min(self) -> float: ...
    @property
    def ttl_step(self) -> float: ...


class LockOptions(NamedTuple):
    """How a lock is to be held. `checked` creates it from a caller's arguments."""

    ttl: float = 30.0
    """Seconds for which the lease outlives a holder that has died."""
    wait: float | None = 10.0
    """Seconds to wait for other holders: None means no limit, 0 means one try."""
    shared: bool = False
    """Let other shared holders hold the lock at the same time."""
    renew: bool = True
    """Renew the lease in the background while this process lives."""
    reentrant: bool = False
    """Let the same thread (in the same context) or task acquire the lock again and join the lease that it has."""
    fair: bool = True
    """False: a free lock may be granted although other waiters are queued for it."""
    on_lost: Callable[[], None] | None = None
    """Called once, from another thread, when the lease is lost."""

    @classmethod
    def checked(  # noqa: PLR0917 - the hot path: keywords cost
        cls,
        ttl: Seconds,
        wait: Seconds | None,
        shared: bool,  # noqa: FBT001
        renew: bool,  # noqa: FBT001
        reentrant: bool,  # noqa: FBT001
        fair: bool,  # noqa: FBT001
        on_lost: Callable[[], None] | None,
    ) -> LockOptions:
        """Return the options that a caller has passed; raises TypeError or ValueError for invalid ones."""
        check_flags(shared, renew, reentrant, fair, on_lost)
        return cls(ttl_seconds(ttl), wait_seconds(wait), shared, renew, reentrant, fair, on_lost)

    def for_store(self, can: _Capabilities) -> LockOptions:
        """Return the options with a ttl rounded up to one that the store supports."""
        ttl = store_ttl(self.ttl, can)
        return self if ttl == self.ttl else self._replace(ttl=ttl)


def store_ttl(ttl: float, can: _Capabilities) -> float:
    """Return a ttl rounded up to one that the store supports."""
    return _rounded_ttl(ttl, can.ttl_step, can.ttl_min)


@lru_cache(maxsize=256)  # One object for all leases of a ttl, of which there are few.
def _rounded_ttl(ttl: float, step: float, least: float) -> float:
    return max(math.ceil(ttl / step - 1e-9) * step, least)


def check_flags(
    shared: object, renew: object, reentrant: object, fair: object, on_lost: Callable[[], None] | None
) -> None:
    """Raise TypeError for switches that are neither True nor False, and for a callback that is not callable."""
    for switch in (shared, renew, reentrant, fair):
        if switch is not True and switch is not False:
            check_switches(shared=shared, renew=renew, reentrant=reentrant, fair=fair)
    if on_lost is not None:
        check_callback("on_lost", on_lost)


def check_switches(**given: object) -> None:
    """Raise TypeError for an option that is neither True nor False, as `renew=60.0` and `shared="no"` are."""
    for name, value in given.items():
        if value is not True and value is not False:
            raise TypeError(f"{name} is True or False, not {type(value).__name__}: {value!r:.80}")


def check_callback(name: str, value: object, *arguments: object) -> None:
    """Raise TypeError for a value that cannot be called with such arguments, and for an async or generator function.

    Otherwise each call would fail, or do nothing, when no caller can learn of it.
    """
    wanted = f"{name} is a function {'with one argument' if arguments else 'without arguments'}"
    if not callable(value):
        raise TypeError(f"{wanted}, not {type(value).__name__}: {value!r:.80}")
    if runs_later(value):
        raise TypeError(
            f"{name} is called where nothing awaits or iterates it: pass a plain function, not {value!r:.80}"
        )
    try:
        inspect.signature(value).bind(*arguments)
    except TypeError:
        raise TypeError(f"{wanted}, which {value!r:.80} is not") from None
    except ValueError:  # Some built-in functions do not tell their arguments.
        return


def unknown_option(names: Iterable[str], known: Iterable[str]) -> TypeError:
    """Return an error that translates an option's name in other libraries to dlock's name."""
    name = next(iter(names))
    return _unknown_option("a lock", name, _OTHER_WORDS.get(name, ""), known)


def unknown_store_option(name: str, known: Iterable[str]) -> TypeError:
    """Return the error for an option that a kind of store does not have; a lock may have it."""
    hint = f"it is an option of a lock: Lock(store, name, {name}=…)" if name in LockOptions._fields else ""
    return _unknown_option("a store of this kind", name, hint, known)


def _unknown_option(what: str, name: str, hint: str, known: Iterable[str]) -> TypeError:
    options = ", ".join(known)
    told = f"Its options: {options}" if options else "It has no options"
    return TypeError(f"{what} has no option {name!r}{'; ' if hint else ''}{hint}. {told}")


def ttl_seconds(ttl: Seconds) -> float:
    """Return a checked ttl in seconds: finite, greater than 0, at most a year; renewal makes a lease last longer."""
    seconds = ttl if type(ttl) is float else _number("ttl", ttl)
    if not 0 < seconds <= MAX_TTL_S:
        raise ValueError(f"ttl must be more than 0 and at most {MAX_TTL_S:.0f} seconds, not {seconds:g}")
    return seconds


def wait_seconds(wait: Seconds | None) -> float | None:
    """Return a checked wait in seconds: None means no limit, 0 means one try, otherwise it is finite."""
    if wait is None:
        return None
    seconds = wait if type(wait) is float else _number("wait", wait)
    if not 0 <= seconds < math.inf:
        raise ValueError(f"wait must be None (for ever), 0 (one try) or a finite number of seconds, not {seconds:g}")
    return seconds


def deadline(now: float, wait: float | None) -> float:
    """Return the time at which a wait that starts now is over; `math.inf` for a wait without a limit."""
    return math.inf if wait is None else now + wait


def _number(what: str, value: object) -> float:
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{what} is seconds (int or float) or a timedelta, not {type(value).__name__}: {value!r:.80}")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def check_seconds(what: str, value: object) -> None:
    """Raise ValueError unless `value` is a valid time limit of a store in seconds."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_STORE_TIME_S:
        raise ValueError(f"{what} must be in seconds, more than 0 and at most a day, not {value!r:.80}")


def checked_prefix(prefix: object) -> str:
    """Return a text that a key can begin with, as a plain str; raises ValueError for anything else."""
    if not isinstance(prefix, str) or len(prefix) > MAX_PREFIX_LENGTH or not prefix.isprintable():
        raise ValueError(f"prefix must be printable text of at most {MAX_PREFIX_LENGTH} characters, not {prefix!r:.80}")
    return str.__str__(prefix)


def masked(text: str) -> str:
    """Return a text whose URLs show neither the user nor the password, nor possible fragments of them."""
    return re.sub(r"(?i)(pass\w*=)[^&#\s]*", r"\1***", re.sub(r"(?s)(?<=://).*@", "***@", text))


def has_swallowed_options(part: str) -> bool:
    """Return whether a host or a path of a URL contains options, for example because of "&" or ";" instead of "?".

    Errors and logs quote hosts and paths, and such an option may be a password. So such a URL is refused.
    """
    return re.search("[&=;]", part) is not None


def is_host(name: str) -> bool:
    """Return whether a name can be looked up: no part between its dots is empty, or has more than 63 letters.

    Python refuses other names only when it connects, with UnicodeError.
    """
    try:
        name.encode("idna")
    except UnicodeError:
        return False
    return True


def tells_secret(text: str, url: str) -> bool:
    """Return whether a text contains a part of a URL's password: with a "/" in it, parsers quote one half of it."""
    login = url.partition(":")[2].rpartition("@")[0]
    secrets = [login, *re.findall(r"(?i)pass\w*=([^&#]*)", url)]
    pieces = {piece for secret in secrets for whole in (secret, unquote(secret)) for piece in re.split(r"\W", whole)}
    return any(piece in text for piece in pieces if piece)
