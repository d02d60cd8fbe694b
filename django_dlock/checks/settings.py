"""Checks of DLOCK and of MIDDLEWARE; they open no connection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from django.conf import settings
from django.core.checks import CheckMessage, Error, Warning  # noqa: A004 - Django's own name
from django.utils.module_loading import import_string

from django_dlock.conf import EXAMPLE, InvalidStore, is_declared, stores
from django_dlock.middleware import LockMiddleware

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MIN_SAFE_TTL_S: Final = 1.0
"""A shorter ttl is likely to run out during an ordinary pause of the process."""
MIDDLEWARE: Final = "django_dlock.middleware.LockMiddleware"
OUTER_MIDDLEWARE: Final = ("django.middleware.security.SecurityMiddleware", "corsheaders.middleware.CorsMiddleware")

_STORE_IDS: Final = {"TTL": "dlock.E004", "WAIT": "dlock.E005"}


def check_stores() -> list[CheckMessage]:
    """Check DLOCK (E001-E005, W004): every store can be created. No connection is opened."""
    if not is_declared():
        return []
    try:
        aliases = list(stores)
    except InvalidStore as error:
        return [_store_error(error)]
    return [message for alias in aliases for message in _store(alias)]


def _store(alias: str) -> Iterator[CheckMessage]:
    try:
        store = stores[alias]
    except InvalidStore as error:
        yield _store_error(error)
        return
    if store.ttl < MIN_SAFE_TTL_S:
        yield Warning(
            f"DLOCK[{alias!r}]['TTL'] is {store.ttl:g} s: a process that pauses for that long loses its leases.",
            hint="Use several seconds: a living holder renews its lease, so the ttl only matters when a holder dies.",
            id="dlock.W004",
        )


def _store_error(error: InvalidStore) -> Error:
    if isinstance(error.__cause__, ImportError):
        hint = "Install the client library of this store, for example dlock-orm[redis], or correct the dotted path."
        return Error(str(error), hint=hint, id="dlock.E003")
    if error.key in ("BACKEND", "OPTIONS"):
        return Error(str(error), hint="A URL looks like redis://localhost:6379/0.", id="dlock.E002")
    hint = (
        "Times are seconds or a timedelta; WAIT may also be None." if error.key else f"A complete setting is {EXAMPLE}"
    )
    return Error(str(error), hint=hint, id=_STORE_IDS.get(error.key, "dlock.E001"))


def check_shared_store() -> list[CheckMessage]:
    """Check for deployment (W011): every store is shared by all processes."""
    try:
        entries = stores.settings.items() if is_declared() else ()
    except InvalidStore:
        return []  # E001 reports it.
    return [
        Warning(
            f"DLOCK[{alias!r}] keeps its leases in the memory of one process, so it does not exclude other processes.",
            hint="Use a store that all processes share, such as redis://.",
            id="dlock.W011",
        )
        for alias, entry in entries
        if isinstance(entry, dict) and str(entry.get("BACKEND")).startswith("memory:")
    ]


def check_middleware() -> list[CheckMessage]:
    """Check MIDDLEWARE (W001-W003): LockMiddleware is in it, once, in the right position, and DLOCK is set."""
    ours = [index for index, path in enumerate(settings.MIDDLEWARE) if _is_ours(path)]
    if ours:
        return [*_middleware_order(ours), *_middleware_unused()]
    if not is_declared():
        return []
    return [
        Warning(
            "DLOCK is set, but LockMiddleware is not in MIDDLEWARE: a view that gets no lock answers with status 500.",
            hint=f"Add {MIDDLEWARE!r} after SecurityMiddleware.",
            id="dlock.W001",
        )
    ]


def _is_ours(path: str) -> bool:
    try:
        found = import_string(path)
    except ImportError:
        return False  # Django reports it.
    return isinstance(found, type) and issubclass(found, LockMiddleware)


def _middleware_order(ours: Sequence[int]) -> Iterator[CheckMessage]:
    if len(ours) > 1:
        yield Warning("LockMiddleware is in MIDDLEWARE more than once.", hint="Keep the first one.", id="dlock.W002")
    for path in settings.MIDDLEWARE[ours[0] :]:
        if path in OUTER_MIDDLEWARE:
            yield Warning(
                f"LockMiddleware stands before {path}, so some of its answers lack the headers of that middleware.",
                hint="Move LockMiddleware after it, but before any that acquires locks or opens transactions.",
                id="dlock.W002",
            )


def _middleware_unused() -> Iterator[CheckMessage]:
    if not is_declared():
        yield Warning(
            "LockMiddleware is in MIDDLEWARE, but DLOCK is not set, so lock() and @locked have no store.",
            hint=f"Set {EXAMPLE}, or DLOCK_URL in the environment.",
            id="dlock.W003",
        )
