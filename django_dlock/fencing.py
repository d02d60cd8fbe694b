"""The fence in Django's databases: the table `dlock_fence`, or the protected row itself (`FencedMixin`)."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from django.core.exceptions import FieldDoesNotExist
from django.db import DatabaseError, models, transaction
from django.db.backends.utils import CursorDebugWrapper
from django.db.models import F

from django_dlock.errors import NotSupported, as_database_error
from django_dlock.tracker import tracker_for
from dlock_core.errors import StaleToken as CoreStaleToken
from dlock_core.sql.database import pyformat
from dlock_core.transactions import fence_sql, fencing
from dlock_core.transactions.fence_sql import DIALECTS, SCHEMA_OF_FUNCTIONS, functions_in
from dlock_core.transactions.fencing import refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from django.db.backends.base.base import BaseDatabaseWrapper

    from dlock_core.transactions.fencing import FenceDialect, FenceEntry

__all__ = [
    "READ_COMMITTED",
    "TABLE_FENCE",
    "FencePort",
    "FencedMixin",
    "RowFence",
    "TableFence",
    "fence_for",
    "isolation_of",
    "isolation_of_session",
    "port_for",
    "send",
]

T = TypeVar("T")


if TYPE_CHECKING:
    _BigIntegerField = models.BigIntegerField[int, int]
    _CharField = models.CharField[str, str]
else:
    _BigIntegerField, _CharField = models.BigIntegerField, models.CharField


class FenceTokenField(_BigIntegerField):
    """The token of the newest holder; only the fence changes it, `save()` does not write it."""

    def pre_save(self, model_instance: models.Model, add: bool) -> Any:  # noqa: FBT001 - Django's form
        return super().pre_save(model_instance, add) if add else F(self.attname)


class FenceHolderField(_CharField):
    """The newest holder; only the fence changes it, `save()` does not write it."""

    def pre_save(self, model_instance: models.Model, add: bool) -> Any:  # noqa: FBT001 - Django's form
        return super().pre_save(model_instance, add) if add else F(self.attname)


class FencedMixin(models.Model):
    """A model whose rows carry the fence themselves: `lock(Order, pk)` admits its token with one UPDATE of that row.

    The row itself is fenced and locked instead of a row in `dlock_fence`, which is used only until the row has its
    first token. Shared locks are not supported. A row that was deleted and created again no longer refuses older
    holders. `save()` does not write the columns; a bulk method does, if they are named to it, and must not.
    """

    dlock_token = FenceTokenField(default=0, db_default=0, editable=False)
    dlock_holder = FenceHolderField(max_length=32, default="", db_default="", editable=False)

    class Meta:
        abstract = True


class TableFence:
    """The row of a lock in `dlock_fence`. Each step runs while the tracker of the connection is suspended."""

    supports_shared = True

    def keeps_snapshot(self, connection: BaseDatabaseWrapper) -> bool:
        """Return whether its transactions read from a snapshot that is older than the row locks they wait for."""
        return port_for(connection).keeps_snapshot

    def admit(self, connection: BaseDatabaseWrapper, entry: FenceEntry) -> int | None:
        """Admit the lease into the open transaction; raises StaleToken, RowLocked, SnapshotTooOld."""
        return _run(fencing.admit, connection, entry)

    def prepare(self, connection: BaseDatabaseWrapper, entry: FenceEntry) -> None:
        """Write the mark of shared holders in a separate transaction, so that they do not wait for each other."""
        _run(fencing.prepare, connection, entry)

    def announce(self, connection: BaseDatabaseWrapper, entry: FenceEntry) -> None:
        """Raise the row in a separate transaction, for a lease over several; raises StaleToken, RowLocked."""
        _run(fencing.announce, connection, entry)

    def confirm(self, connection: BaseDatabaseWrapper, entry: FenceEntry) -> None:
        """Verify just before COMMIT that no newer holder was announced; raises StaleToken, RowLocked."""
        _run(fencing.confirm, connection, entry)


TABLE_FENCE: Final = TableFence()


class RowFence(TableFence):
    """The fence columns of one row of a `FencedMixin` model."""

    supports_shared = False

    def __init__(self, model: type[FencedMixin], key: Any) -> None:
        self.key = model._meta.pk.get_prep_value(key)
        self.model = model._meta.get_field("dlock_token").model  # a child's UPDATE would first SELECT, and be too late

    def admit(self, connection: BaseDatabaseWrapper, entry: FenceEntry) -> None:
        self._run_on_row(fence_sql.admit, connection, entry)

    def announce(self, connection: BaseDatabaseWrapper, entry: FenceEntry) -> None:
        # The row, and its substitute in the table, are raised together.
        with transaction.atomic(using=connection.alias):
            self._run_on_row(fence_sql.announce, connection, entry)

    def confirm(self, connection: BaseDatabaseWrapper, entry: FenceEntry) -> None:
        self._run_on_row(fence_sql.confirm, connection, entry)

    def _run_on_row(
        self, ask: Callable[[fence_sql.FencedRow, FenceEntry], None], connection: BaseDatabaseWrapper, entry: FenceEntry
    ) -> None:
        key: Any = self.model._meta.pk
        quoted = connection.ops.quote_name
        condition = f"{quoted(key.column)} = :key"
        statements = fence_sql.statements(_vendor(connection), quoted(self.model._meta.db_table), condition)
        value = key.get_db_prep_value(self.key, connection)

        def ask_row(port: FencePort, dialect: FenceDialect, entry: FenceEntry) -> None:
            ask(fence_sql.FencedRow(_Keyed(port, value), statements, dialect), entry)

        _run(ask_row, connection, entry)


def fence_field(model: Any) -> Any:
    """Return the column of the fence of a model, or None; models inside migrations have it without the mixin."""
    with suppress(FieldDoesNotExist, AttributeError):  # AttributeError: no model
        field = model._meta.get_field("dlock_token")
        return field if isinstance(field, FenceTokenField) else None
    return None


def fence_for(parts: tuple[Any, ...]) -> TableFence:
    """Return the fence of a lock by its parts: (Model, pk) of a `FencedMixin` model, or anything else."""
    if len(parts) == 2 and isinstance(parts[0], type) and fence_field(parts[0]) is not None:
        return RowFence(parts[0], parts[1])
    return TABLE_FENCE


class FencePort:
    """Sends the statements of the fence on one connection to a server, whose features it knows."""

    def __init__(self, connection: Any, server: _Server | None) -> None:
        self._connection, self.driver = connection, connection.connection
        self.vendor = _vendor(connection)
        self.dialect = _dialect(connection, server)
        self.keeps_snapshot = _keeps_snapshot(connection, server)

    def execute(self, sql: str, params: Mapping[str, Any]) -> tuple[int, tuple[Any, ...] | None]:
        return send(self._connection, pyformat(sql), params)


class _Keyed:
    """Adds the key of a row to every statement."""

    def __init__(self, port: FencePort, key: Any) -> None:
        self._port, self._key = port, key

    def execute(self, sql: str, params: Mapping[str, Any]) -> tuple[int, tuple[Any, ...] | None]:
        return self._port.execute(sql, {**params, "key": self._key})


def port_for(connection: BaseDatabaseWrapper) -> FencePort:
    """Return the port of a connection; it is cached until the driver's connection is replaced.

    Raises NotSupported for a database without a fence (Oracle).
    """
    port: FencePort | None = vars(connection).get("_dlock_fence")
    if port is None or port.driver is not connection.connection:
        server = _server_of(connection) if connection.vendor == "postgresql" else None
        port = FencePort(connection, server)
        if server is not None or connection.vendor != "postgresql":
            vars(connection)["_dlock_fence"] = port
    return port


def _dialect(connection: BaseDatabaseWrapper, server: _Server | None) -> FenceDialect:
    if server is not None and server.functions is not None:
        return functions_in(server.functions)
    try:
        return DIALECTS[_vendor(connection)]
    except KeyError:
        known = ", ".join(DIALECTS)
        raise NotSupported(f"no fence on {connection.vendor}: use one of {known}, or pass fence=False") from None


def _vendor(connection: BaseDatabaseWrapper) -> str:
    return "mariadb" if getattr(connection, "mysql_is_mariadb", False) else connection.vendor


def _run(step: Callable[[FencePort, FenceDialect, FenceEntry], T], connection: Any, entry: FenceEntry) -> T:
    """Execute a step of the fence; a database error with a meaning for the fence is raised as that error."""
    try:
        port = port_for(connection)
        if entry.limit is not None and port.vendor == "mysql":  # the other statements set it themselves
            from django_dlock.row_sql import waiting

            with waiting(connection, max(0.001, entry.limit)):  # 0 would be no limit
                return step(port, port.dialect, entry)
        return step(port, port.dialect, entry)
    except CoreStaleToken as error:
        raise as_database_error(error) from None
    except DatabaseError as error:
        meant = refusal(error, entry, connection.vendor)
        if meant is None:  # the driver's error is the most precise
            if connection.vendor == "postgresql" and connection.connection is not None:
                _servers.pop(connection.connection, None)  # the functions may have been dropped, or access revoked
            vars(connection).pop("_dlock_fence", None)
            raise
        raise as_database_error(meant) from error


def send(connection: Any, sql: str, params: Mapping[str, Any]) -> tuple[int, tuple[Any, ...] | None]:
    """Send one of dlock's statements with `%(name)s` parameters; return the number of changed rows, and the first row.

    Django logs and wraps it like the application's. The number is valid only if the statement returns no rows.
    """
    if connection.vendor == "postgresql":
        cursor = _cursor_of(connection)
        cursor.execute(sql, params)
        answer = cursor.cursor  # The driver's cursor: it has the whole result, so no error is left to be translated.
        return (0, answer.fetchone()) if sql.startswith(("SELECT", "WITH")) else (answer.rowcount, None)
    with connection.cursor() as cursor:
        cursor.execute(sql, params)
        answer = cursor.cursor
        return answer.rowcount, answer.fetchone() if answer.description else None


def _cursor_of(connection: Any) -> Any:
    """Return a cursor that is kept for the next statement: creating one costs as much as all the rest.

    A new one is created if that would check the connection, or if it would be of another kind: one that logs, or one
    from a tool that has replaced `connection.cursor`.
    """
    if "cursor" in vars(connection):
        return connection.cursor()
    driver, cursor = vars(connection).get("_dlock_cursor", (None, None))
    if (
        cursor is None
        or driver is not connection.connection
        or (connection.health_check_enabled and not connection.health_check_done)
        or isinstance(cursor, CursorDebugWrapper) is not connection.queries_logged
    ):
        cursor = connection.cursor()
        vars(connection)["_dlock_cursor"] = connection.connection, cursor
    return cursor


READ_COMMITTED: Final = ("read committed", "read uncommitted")
"""Isolation levels in which each statement sees what was committed before it."""


class _Server(NamedTuple):
    """Properties of a PostgreSQL server, read once for each session."""

    default_isolation: str
    """The default isolation level of transactions."""
    functions: str | None
    """The quoted schema with the fence's functions; None if there are none that this role may call."""


_servers: Final[WeakKeyDictionary[Any, _Server]] = WeakKeyDictionary()
"""By the driver's connection, each of which is queried once, including those of a pool."""


def _server_of(connection: BaseDatabaseWrapper) -> _Server | None:
    """Query PostgreSQL once for each connection; return None in a transaction, whose snapshot the query would take."""
    known = _servers.get(connection.connection) if connection.connection is not None else None
    if known is None and not tracker_for(connection).is_open():
        known = _Server(*_first_row(connection, _ASK_SERVER))
        _servers[connection.connection] = known
    return known


_ASK_SERVER: Final = f"SELECT current_setting('default_transaction_isolation'), {SCHEMA_OF_FUNCTIONS}"


def _keeps_snapshot(connection: BaseDatabaseWrapper, server: _Server | None) -> bool:
    """Return whether its transactions read from a snapshot that is older than the row locks they wait for.

    On MySQL and MariaDB the snapshot comes later, and on SQLite there is one writer.
    """
    if connection.vendor != "postgresql":
        return False
    given = connection.settings_dict["OPTIONS"].get("isolation_level")
    if given is not None:
        from django.db.backends.postgresql.psycopg_any import IsolationLevel  # type: ignore[import-untyped]

        return str(IsolationLevel(given).name).replace("_", " ").lower() not in READ_COMMITTED
    return server is not None and server.default_isolation not in READ_COMMITTED


def isolation_of(connection: BaseDatabaseWrapper) -> str | None:
    """Return the isolation level of the open transaction in lower case; None if it does not matter (SQLite)."""
    if connection.vendor == "postgresql":
        return str(first_value(connection, "SHOW transaction_isolation"))
    if connection.vendor != "mysql":
        return None
    level = str(getattr(connection, "isolation_level", None) or "")
    return level if level in READ_COMMITTED else isolation_of_session(connection)


def isolation_of_session(connection: BaseDatabaseWrapper) -> str:
    """Return what a session of MySQL or MariaDB has as isolation level, in lower case, whoever has set it."""
    variable = "tx_isolation" if connection.mysql_is_mariadb else "transaction_isolation"  # type: ignore[attr-defined]
    return str(first_value(connection, f"SELECT @@{variable}")).replace("-", " ").lower()


def first_value(connection: BaseDatabaseWrapper, sql: str) -> Any:
    """Return the first value of the result of one of dlock's queries, which no lease sees."""
    return next(iter(_first_row(connection, sql)), None)


def _first_row(connection: BaseDatabaseWrapper, sql: str) -> tuple[Any, ...]:
    with tracker_for(connection).suspended, connection.cursor() as cursor:
        cursor.execute(sql)
        row: tuple[Any, ...] | None = cursor.fetchone()
        return row or ()
