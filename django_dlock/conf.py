"""The `DLOCK` setting: named stores of leases, created once per process and shared by all its threads.

The setting is read when a store is first used, and again after `override_settings`; nothing is written back to it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, cast

from django.conf import settings as django_settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.db.backends.base.base import NO_DB_ALIAS
from django.db.backends.signals import connection_created
from django.dispatch import receiver
from django.utils.connection import BaseConnectionHandler
from django.utils.module_loading import import_string

from dlock_core.errors import DLockError
from dlock_core.options import tells_secret, ttl_seconds, wait_seconds
from dlock_core.stores import DEFAULT_TTL_S, DEFAULT_WAIT_S, Store, connect

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from dlock_core.backend import Backend

    Handler = BaseConnectionHandler["Store"]
else:
    Handler = BaseConnectionHandler

__all__ = ["InvalidStore", "Store", "UnknownStore", "stores"]

ENTRY_KEYS: Final = ("BACKEND", "TTL", "WAIT", "OPTIONS")
DATABASE_FACTORIES: Final = {
    "advisory": "django_dlock.backends.advisory.from_url",
    "database": "django_dlock.backends.table.from_url",
}
"""The functions that create the stores in a database of DATABASES, by URL scheme."""
WRONG_SETTING: Final = (
    ImportError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    OSError,
    ImproperlyConfigured,
    DLockError,
)
"""The errors of a backend's creation for a wrong setting; OSError for a missing file, such as a certificate.

Any other exception, and TimeoutError, may come from a signal handler that interrupts the creation, as Celery's soft
time limit does: it must reach the caller unchanged.
"""
EXAMPLE: Final = 'DLOCK = {"default": {"BACKEND": "redis://localhost:6379/0"}}'


class InvalidStore(ImproperlyConfigured):
    """An entry of DLOCK cannot be used; `key` is the wrong part of it, or empty if it is the entry itself."""

    def __init__(self, problem: str, alias: str = "", key: str = "") -> None:
        path = "DLOCK" + "".join(f"[{part!r}]" for part in (alias, key) if part)
        super().__init__(f"{path}: {problem}")
        self.key = key


class UnknownStore(InvalidStore):
    """DLOCK has no store of this name."""


class Stores(Handler):
    """The stores of DLOCK by alias: `stores["default"]`.

    Unlike with CACHES, all threads share the same store. Raises InvalidStore or UnknownStore, before any I/O.
    """

    settings_name = "DLOCK"
    exception_class = UnknownStore

    def __init__(self, settings: dict[str, Any] | None = None) -> None:
        super().__init__(settings)
        self._connections = SimpleNamespace()
        self.created: dict[str, Store] = vars(self._connections)
        """The stores that were already used, by alias: every acquire checks here first."""
        self._create_lock = threading.RLock()  # A signal handler may request the same store in the middle.
        self._own_backends: list[Backend] = []

    def configure_settings(self, settings: dict[str, Any] | None) -> dict[str, Any]:
        declared = settings if settings is not None else _declared()
        if not isinstance(declared, Mapping) or not all(isinstance(alias, str) and alias for alias in declared):
            raise InvalidStore(f"must be a dict of stores by name, such as {EXAMPLE}")
        return dict(declared)

    def __getitem__(self, alias: str) -> Store:
        found = self.created.get(alias)
        if found is not None:
            return found
        with self._create_lock:
            if alias not in self.settings:
                known = ", ".join(map(repr, self.settings)) or "none"
                raise UnknownStore(f"there is no store {alias!r}, only: {known}")
            if alias not in self.created:
                made = self.create_connection(alias)
                self.created.setdefault(alias, made)
            return self.created[alias]

    def create_connection(self, alias: str) -> Store:
        entry = _entry(alias, self.settings[alias])
        ttl, wait = _ttl(alias, entry), _wait(alias, entry)
        backend = _backend(alias, entry["BACKEND"], dict(entry.get("OPTIONS", {})))
        if isinstance(entry["BACKEND"], str):
            self._own_backends.append(backend)
        return Store(alias, backend, ttl, wait)

    def prepare(self) -> None:
        """Create every store now, so that the first request does not wait for the import of a client library.

        Nothing is sent. Errors are ignored here: each use of a wrong store raises them, and the system checks report
        them.
        """
        with suppress(ImproperlyConfigured):
            for alias in self:
                with suppress(ImproperlyConfigured):
                    self[alias]

    def close_all(self) -> None:
        """Close the connections of the backends that were created here, not of backends given in the setting."""
        for backend in self._own_backends:
            backend.close()

    def reset(self) -> None:
        """Close all stores, and read the setting again at the next use; leases are not released."""
        with self._create_lock:
            self.close_all()
            self._own_backends.clear()
            self._connections = SimpleNamespace()
            self.created = vars(self._connections)
            self._settings = None
            self.__dict__.pop("settings", None)


def is_declared() -> bool:
    """Return whether the project has named its stores, in DLOCK or by DLOCK_URL in the environment."""
    return getattr(django_settings, "DLOCK", None) is not None or bool(os.environ.get("DLOCK_URL"))


def _declared() -> object:
    if not is_declared():
        raise InvalidStore(f"is missing: set {EXAMPLE}, or DLOCK_URL in the environment")
    declared = getattr(django_settings, "DLOCK", None)
    return declared if declared is not None else {"default": {"BACKEND": os.environ["DLOCK_URL"]}}


def _entry(alias: str, entry: object) -> Mapping[str, Any]:
    if not isinstance(entry, Mapping):
        raise InvalidStore(f"must be a dict with {', '.join(ENTRY_KEYS)}, not {type(entry).__name__}", alias)
    if unknown := [key for key in entry if key not in ENTRY_KEYS]:
        raise InvalidStore(f"has the unknown key {unknown[0]!r}; known are {', '.join(ENTRY_KEYS)}", alias)
    if "BACKEND" not in entry:
        raise InvalidStore("is missing: give a URL, such as 'redis://localhost:6379/0'", alias, "BACKEND")
    if not isinstance(entry.get("OPTIONS", {}), Mapping):
        raise InvalidStore(f"must be a dict, not {type(entry['OPTIONS']).__name__}", alias, "OPTIONS")
    return entry


def _ttl(alias: str, entry: Mapping[str, Any]) -> float:
    try:
        return ttl_seconds(entry.get("TTL", DEFAULT_TTL_S))
    except (TypeError, ValueError) as error:
        raise InvalidStore(str(error), alias, "TTL") from None


def _wait(alias: str, entry: Mapping[str, Any]) -> float | None:
    try:
        return wait_seconds(entry.get("WAIT", DEFAULT_WAIT_S))
    except (TypeError, ValueError) as error:
        raise InvalidStore(str(error), alias, "WAIT") from None


def _backend(alias: str, given: Any, options: dict[str, Any]) -> Backend:
    if hasattr(given, "try_acquire") and not isinstance(given, type):
        if options:
            raise InvalidStore("has no effect on a backend that exists already: remove it", alias, "OPTIONS")
        return cast("Backend", given)
    try:
        return _create_backend(given, options)
    except TimeoutError:
        raise
    except WRONG_SETTING as error:
        reason = f"{type(error).__name__}: {error}"
        if tells_secret(reason, str(given)):
            raise InvalidStore(f"cannot be used ({type(error).__name__})", alias, "BACKEND") from None
        raise InvalidStore(f"cannot be used: {reason}", alias, "BACKEND") from error


def _create_backend(given: Any, options: dict[str, Any]) -> Backend:
    if isinstance(given, str) and (factory := DATABASE_FACTORIES.get(given.partition("://")[0])):
        return cast("Backend", import_string(factory)(given, **options))
    if not isinstance(given, str) or ":" in given:
        return connect(given, **options)
    backend = import_string(given)(**options)
    if not hasattr(backend, "try_acquire"):
        raise TypeError(f"{given} gives {type(backend).__name__}, which is no backend: it has no try_acquire")
    return cast("Backend", backend)


stores: Final = Stores()


@receiver(connection_created)
def _close_idle(*, connection: BaseDatabaseWrapper, **_: object) -> None:
    """Close idle connections before a database is created or dropped, because PostgreSQL drops none that is in use."""
    if connection.alias == NO_DB_ALIAS:
        stores.close_all()


@receiver(setting_changed)
def _reset_after_override(*, setting: str, **_: object) -> None:
    if setting == "DLOCK":
        stores.reset()
