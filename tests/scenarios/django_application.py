"""Django, as the scenarios use it: a session is the calling thread's connection to the alias."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any

from django.db import connections
from django.db.models import F
from django.db.transaction import atomic
from django.test import override_settings

from django_dlock import lock
from django_dlock.tie import current
from tests import databases
from tests.django_dlock import isolation
from tests.django_dlock.sessions import rows
from tests.django_dlock.tracking import on_end
from tests.scenarios.application import Application, Place, Session, noting
from tests.testapp.models import Counter, Parcel

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlock_core.transactions.tie import Outcome


class DjangoSession(Session):
    def __init__(self, alias: str) -> None:
        self.alias = alias
        self._atomic: atomic | None = None

    def lock(self, *parts: Any, **options: Any) -> AbstractContextManager[Any]:
        return lock(*parts, using=self.alias, **options)

    def begin(self) -> None:
        beginning = atomic(self.alias)
        beginning.__enter__()
        self._atomic = beginning

    def commit(self) -> None:
        if self._atomic is not None:
            ending, self._atomic = self._atomic, None
            ending.__exit__(None, None, None)

    def rollback(self) -> None:
        if self._atomic is not None:
            ending, self._atomic = self._atomic, None
            ending.__exit__(RuntimeError, RuntimeError("rolled back on purpose"), None)

    def savepoint(self) -> AbstractContextManager[Any]:
        return atomic(self.alias)

    def close(self) -> None:
        connections.close_all()

    def read(self) -> int:
        return Counter.objects.using(self.alias).get(name="a").value

    def write(self, value: int) -> None:
        Counter.objects.using(self.alias).filter(name="a").update(value=value)

    def add_one(self) -> None:
        Counter.objects.using(self.alias).filter(name="a").update(value=F("value") + 1)

    def add(self, name: str) -> None:
        Counter.objects.using(self.alias).create(name=name)

    def add_parcel(self, key: int) -> None:
        Parcel.objects.using(self.alias).create(pk=key)

    def ask(self, sql: str) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in rows(connections[self.alias], sql)]

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    def note_ends(self, journal: list[str]) -> None:
        connections[self.alias].close()
        del connections[self.alias]
        connection = connections[self.alias]
        for method, word in (("_commit", "COMMIT"), ("_rollback", "ROLLBACK")):
            vars(connection)[method] = noting(getattr(connection, method), journal, word)

    def ties(self) -> list[Any]:
        return list(current())

    def on_end(self, settle: Callable[[Outcome], object], *, before_commit: Callable[[], object] | None = None) -> None:
        on_end(settle, using=self.alias, before_commit=before_commit)


class DjangoApplication(Application):
    counters = "testapp_counter"
    parcel, parcels = Parcel, "testapp_parcel"

    def __init__(self, place: Place) -> None:
        super().__init__(place, place.driver)
        self.alias, settings = isolation.alias(database_of(place), place.level)
        connections.settings[self.alias] = settings
        self._stack = ExitStack()
        self._stack.callback(connections.settings.pop, self.alias)
        self._stack.callback(self._close_connection)
        self._beside = connections[self.alias].copy()
        self._beside.inc_thread_sharing()
        self._stack.callback(self._beside.close)

    def session(self, *, lock_timeout: bool = False) -> DjangoSession:
        if lock_timeout:
            rows(connections[self.alias], databases.SET_LOCK_TIMEOUT[self.server])
        return DjangoSession(self.alias)

    def session_behind(self, port: int) -> DjangoSession:
        connections[self.alias].close()
        connections.settings[self.alias]["PORT"] = port
        del connections[self.alias]
        return DjangoSession(self.alias)

    def use_store(self, backend: Any, *, ttl: float = 60.0) -> None:
        stores = {"default": {"BACKEND": backend, "TTL": ttl, "WAIT": 20}}
        self._stack.enter_context(override_settings(DLOCK=stores))

    def ask(self, sql: str) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in rows(self._beside, sql)]

    def close(self) -> None:
        self._stack.close()

    def _close_connection(self) -> None:
        connections[self.alias].close()
        del connections[self.alias]


def database_of(place: Place) -> str:
    """Return the alias in the settings."""
    return "default" if place.driver == "sqlite" else place.driver
