"""The fence in SQLAlchemy's databases: the table `dlock_fence`, or the protected row itself (`FencedMixin`)."""

from __future__ import annotations

import math
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar
from weakref import ref

from sqlalchemy import (
    BigInteger,
    Connection,
    Engine,
    String,
    bindparam,
    column,
    event,
    inspect,
    text,
)
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.orm import mapped_column
from sqlalchemy.orm.attributes import set_committed_value

from dlock_core.errors import NotSupported
from dlock_core.runtime import clock
from dlock_core.sql.driver_errors import DatabaseFailure, failure_of_statement
from dlock_core.transactions import fence_sql, fencing
from dlock_core.transactions.fence_functions import CREATE_BOTH as CREATE_FUNCTIONS
from dlock_core.transactions.fence_sql import DIALECTS, MYSQL, POSTGRESQL, SCHEMA_OF_FUNCTIONS, functions_in
from dlock_core.transactions.fencing import refusal
from sqla_dlock.connections import note_xid
from sqla_dlock.fence_columns import FENCE_COLUMNS, refuse_fence_columns, refuse_fence_columns_in_ctes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from sqlalchemy import CursorResult, Dialect, TextClause, TextualSelect
    from sqlalchemy.orm import Mapped, Mapper
    from sqlalchemy.types import TypeEngine

    from dlock_core.transactions.fencing import FenceEntry
    from sqla_dlock.tables import fence_metadata as metadata
    from sqla_dlock.tables import fence_table as table

__all__ = [
    "CREATE_FUNCTIONS",
    "READ_COMMITTED",
    "FencedMixin",
    "RowFence",
    "TableFence",
    "class_of",
    "keeps_snapshot",
    "metadata",
    "table",
]

T = TypeVar("T")

READ_COMMITTED: Final = ("READ COMMITTED", "READ UNCOMMITTED", "AUTOCOMMIT")
"""Isolation levels in which each statement sees what was committed before it."""
_WHAT_TO_DO: Final = (
    "dlock: this statement was the fence of a lock, which needs its table in a writable database: create it with "
    "sqla_dlock.fencing.metadata.create_all() if it is missing, or pass fence=False"
)


def __getattr__(name: str) -> Any:
    """Create the table object at the first access: its engine for MySQL loads a dialect that few applications need."""
    if name not in {"metadata", "table"}:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sqla_dlock import tables

    globals().update(metadata=tables.fence_metadata, table=tables.fence_table)
    return globals()[name]


class FencedMixin:
    """A class whose rows carry the fence themselves.

    `lock(session, Order, 42)` admits its token with one UPDATE of that row. The row itself is fenced and locked instead
    of a row in `dlock_fence`, which is used only until the row has its first token. Shared locks are not supported. A
    row that was deleted and created again no longer refuses older holders. An UPDATE or upsert that sets one of the two
    columns raises NotSupported; textual SQL is not covered.
    """

    if TYPE_CHECKING:
        dlock_token: Mapped[int]
        dlock_holder: Mapped[str]
    else:  # without annotations they are not fields of a dataclass, and other classes may have them, too
        dlock_token = mapped_column(BigInteger, nullable=False, default=0, server_default="0")
        dlock_holder = mapped_column(String(32), nullable=False, default="", server_default=text("''"))


@event.listens_for(FencedMixin, "before_update", propagate=True)
def _keep_out_of_flush(_mapper: Mapper[Any], _connection: Connection, instance: FencedMixin) -> None:
    """Keep the columns out of a flush: an instance may have an old token, and only the fence writes it."""
    for name in FENCE_COLUMNS:
        history = inspect(instance).attrs[name].history
        if history.added:
            set_committed_value(instance, name, (history.deleted or history.added)[0])


_classes: Final[dict[str, ref[type]]] = {}
"""The classes whose rows carry the fence, by the name of the table, which is the prefix of their locks' names."""


@event.listens_for(FencedMixin, "instrument_class", propagate=True)
def _remember(mapper: Mapper[Any], cls: type) -> None:
    above = mapper.inherits
    if (
        above is None
        or mapper.concrete
        or not (mapper.local_table is above.local_table or issubclass(above.class_, FencedMixin))
    ):
        _classes[getattr(mapper.local_table, "fullname", "")] = ref(cls)


@event.listens_for(FencedMixin, "after_mapper_constructed", propagate=True)
def _check_mapping(mapper: Mapper[Any], cls: type) -> None:
    if mapper.concrete and FENCE_COLUMNS[0] not in mapper.local_table.c:
        raise ArgumentError(
            f"{cls.__name__} is concrete, with a separate table, and has no fence there: give it an __abstract__ "
            "parent with FencedMixin instead of a mapped one"
        )
    if mapper.tables and not any(FENCE_COLUMNS[0] in table.c for table in mapper.tables):
        raise ArgumentError(
            f"the table of {cls.__name__} has no columns {' and '.join(FENCE_COLUMNS)}: add them to the Table to which "
            "the class is mapped"
        )
    if not event.contains(Engine, "before_execute", refuse_fence_columns):  # not in programs without such classes
        event.listen(Engine, "before_execute", refuse_fence_columns)
        event.listen(Engine, "before_cursor_execute", refuse_fence_columns_in_ctes)


def class_of(label: str | None) -> type | None:
    """Return the `FencedMixin` class whose locks have names that begin with this text."""
    found = None if label is None else _classes.get(label)
    return None if found is None else found()


def keeps_snapshot(bind: Engine | Connection) -> bool:
    """Return whether its transactions read from a snapshot that is older than the row locks they wait for.

    On MySQL and MariaDB the snapshot comes later, and on SQLite there is one writer. No I/O once the engine has
    connected.
    """
    dialect: Any = bind.dialect
    if dialect.name != "postgresql":
        return False
    # No public API returns the level of create_engine(isolation_level=…); the options' public way costs a call.
    level = bind._execution_options.get("isolation_level") or dialect._on_connect_isolation_level  # noqa: SLF001
    return _is_snapshot(level or getattr(dialect, "default_isolation_level", None) or _ask_level(bind))


@lru_cache
def _is_snapshot(level: str) -> bool:
    return str(level).upper().replace("_", " ") not in READ_COMMITTED


def _ask_level(bind: Engine | Connection) -> Any:
    """Query the server, as an engine's first connection does; a second one may be open before that is answered."""
    with bind.engine.connect() as connection:
        return connection.get_isolation_level()


class TableFence:
    """The row of a lock in `dlock_fence`."""

    supports_shared = True
    keeps_snapshot = staticmethod(keeps_snapshot)

    def admit(self, connection: Connection, entry: FenceEntry) -> int | None:
        """Admit the lease into the open transaction; raises StaleToken, RowLocked, SnapshotTooOld."""
        return _run(fencing.admit, connection, entry)

    def prepare(self, bind: Engine | Connection, entry: FenceEntry) -> None:
        """Write the mark of shared holders in a separate transaction, so that they do not wait for each other."""
        fencing.prepare(_OwnTransactions(bind, entry), _dialect(bind), entry)

    def announce(self, bind: Engine | Connection, entry: FenceEntry) -> None:
        """Raise the row in a separate transaction, for a lease over several; raises StaleToken, RowLocked."""
        with _own_transaction(bind) as connection:
            _run(fencing.announce, connection, entry)

    def confirm(self, connection: Connection, entry: FenceEntry) -> None:
        """Verify just before COMMIT that no newer holder was announced; raises StaleToken, RowLocked."""
        _run(fencing.confirm, connection, entry)


TABLE_FENCE: Final = TableFence()
"""It has no state, so one object serves all locks."""


class RowFence(TableFence):
    """The fence columns of one row of a `FencedMixin` class, or of another class on a table that has them."""

    supports_shared = False

    def __init__(self, mapper: Mapper[Any], key: Any) -> None:
        self.table: Any = next(table for table in mapper.tables if FENCE_COLUMNS[0] in table.c)
        if len(mapper.primary_key) != 1:
            raise NotSupported(
                f"{mapper.class_.__name__} has a composite key: name its lock by a text instead of its class"
            )
        (self.column,) = mapper.primary_key  # that of the class, which its table need not have as its own
        self.key = key

    def admit(self, connection: Connection, entry: FenceEntry) -> None:
        self._run_on_row(fence_sql.admit, connection, entry)

    def announce(self, bind: Engine | Connection, entry: FenceEntry) -> None:
        with _own_transaction(bind) as connection:
            self._run_on_row(fence_sql.announce, connection, entry)

    def confirm(self, connection: Connection, entry: FenceEntry) -> None:
        self._run_on_row(fence_sql.confirm, connection, entry)

    def _run_on_row(
        self, ask: Callable[[fence_sql.FencedRow, FenceEntry], None], connection: Connection, entry: FenceEntry
    ) -> None:
        port = Port(connection, self.key, self.column.type)
        row = fence_sql.FencedRow(port, self._statements(connection), _dialect(connection))
        _run(lambda _port, _dialect, entry: ask(row, entry), connection, entry)

    def _statements(self, connection: Connection) -> fence_sql.RowStatements:
        quoted = connection.dialect.identifier_preparer
        table = quoted.format_table(self.table, use_schema=False)
        if schema := connection.schema_for_object(self.table):  # minds a schema_translate_map
            table = f"{quoted.quote_schema(schema)}.{table}"
        return fence_sql.statements(_vendor(connection), table, f"{quoted.format_column(self.column)} = :key")


class Port:
    """Sends the fence's statements in the connection's transaction."""

    def __init__(self, connection: Connection, key: Any = None, key_type: TypeEngine[Any] | None = None) -> None:
        self._connection, self._key, self._key_type = connection, key, key_type

    def execute(self, sql: str, params: Mapping[str, Any]) -> tuple[int, tuple[Any, ...] | None]:
        statement = _statement(sql, self._key_type)
        if self._key_type is not None:
            params = {**params, "key": self._key}
        result = self._connection.execute(statement.form, params, execution_options=_AT_ONCE)
        if not statement.answers and not statement.learns_from(result):
            return result.rowcount, None
        row = result.first()
        if row is None:
            return result.rowcount, None
        if statement.xid_at is not None and (xid := row[statement.xid_at]):
            note_xid(self._connection, str(xid))
        return 1, tuple(row)


_AT_ONCE: Final = {"stream_results": False, "yield_per": None}
"""Execution options: no server-side cursor, which accepts only plain queries, whatever the connection's options."""


class _OwnTransactions:
    """Sends each of the fence's statements in a separate transaction."""

    def __init__(self, bind: Engine | Connection, entry: FenceEntry) -> None:
        self._bind, self._entry = bind, entry

    def execute(self, sql: str, params: Mapping[str, Any]) -> tuple[int, tuple[Any, ...] | None]:
        with _own_transaction(self._bind) as connection:
            return _run(lambda port, _dialect, _entry: port.execute(sql, params), connection, self._entry)


class _Statement:
    """One statement, with SQLAlchemy's metadata of its result, which is computed each time for a plain text."""

    def __init__(self, sql: str, key_type: TypeEngine[Any] | None) -> None:
        keys = [bindparam("key", type_=key_type)] if key_type is not None and ":key" in sql else []
        self.form: TextClause | TextualSelect = text(sql).bindparams(*keys)
        self._text = self.form
        self.answers = False
        """Whether it is known to return rows."""
        self.xid_at: int | None = None
        """The column with the transaction's number, if there is one."""

    def learns_from(self, result: CursorResult[Any]) -> bool:
        """Return whether there are rows; every server returns the same columns for one text."""
        if result.returns_rows:
            keys = list(result.keys())
            self.xid_at = keys.index("xid") if "xid" in keys else None
            self.form = self._text.columns(*map(column, keys))
            self.answers = True
        return self.answers


@lru_cache(maxsize=256)
def _statement(sql: str, key_type: TypeEngine[Any] | None) -> _Statement:
    return _Statement(sql, key_type)


def _vendor(connection: Engine | Connection) -> str:
    return "mariadb" if getattr(connection.dialect, "is_mariadb", False) else connection.dialect.name


def _run(step: Callable[[Port, fencing.FenceDialect, FenceEntry], T], connection: Connection, entry: FenceEntry) -> T:
    """Execute a step of the fence; a database error with a meaning for the fence is raised as that error."""
    try:
        dialect = _dialect(connection)
        if entry.limit is not None and dialect is MYSQL:  # the other statements set it themselves
            from sqla_dlock.row_sql import waiting_on_mysql  # loads a module that no other database needs

            with waiting_on_mysql(connection, entry.limit):
                return step(Port(connection), dialect, entry)
        return step(Port(connection), dialect, entry)
    except DBAPIError as error:
        meant = refusal(error, entry, connection.dialect.name)
        if meant is None:  # the driver's error is the most precise
            failure = failure_of_statement(error)
            if failure in (DatabaseFailure.MISSING_FUNCTION, DatabaseFailure.NO_ACCESS):
                _forget_functions(connection.dialect)
            if failure in (None, DatabaseFailure.MISSING_TABLE, DatabaseFailure.NO_ACCESS):
                error.add_note(_WHAT_TO_DO)
            raise
        raise meant from error


ASK_AGAIN_S: Final = 60.0
"""Seconds after which an engine looks again for missing functions: a migration may have created them."""

_ASK_SCHEMA: Final = text(f"SELECT {SCHEMA_OF_FUNCTIONS}")


class _Known(NamedTuple):
    """What an engine sends: calls of the functions if they exist, otherwise the statements; and until when."""

    statements: fencing.FenceDialect
    until: float = math.inf


def _dialect(bind: Engine | Connection) -> fencing.FenceDialect:
    known: _Known | None = vars(bind.dialect).get("_dlock_fence")  # An engine has its own dialect, for life.
    if known is not None and clock() < known.until:
        return known.statements
    vendor = _vendor(bind)
    if vendor not in DIALECTS:
        known_ones = ", ".join(DIALECTS)
        raise NotSupported(f"no fence on {vendor}: use one of {known_ones}, or pass fence=False")
    if not isinstance(bind, Connection) or keeps_snapshot(bind):  # It may not have connected, or must not be queried.
        return DIALECTS[vendor]
    statements = _ask_postgresql(bind) if vendor == "postgresql" else DIALECTS[vendor]
    until = clock() + ASK_AGAIN_S if statements is POSTGRESQL else math.inf
    vars(bind.dialect)["_dlock_fence"] = _Known(statements, until)
    return statements


def _ask_postgresql(connection: Connection) -> fencing.FenceDialect:
    """Look up the functions; not in a snapshot, which would be older than the admit."""
    schema = connection.scalar(_ASK_SCHEMA, execution_options=_AT_ONCE)
    return POSTGRESQL if schema is None else functions_in(schema, with_xid=True)


def _forget_functions(dialect: Dialect) -> None:
    """Send the statements from now on: the functions were dropped, or revoked, or one database does not have them.

    They are not looked up again, because different connections may lead to different databases, or roles.
    """
    known: _Known | None = vars(dialect).get("_dlock_fence")
    if dialect.name == "postgresql" and known is not None and known.statements is not POSTGRESQL:
        vars(dialect)["_dlock_fence"] = _Known(POSTGRESQL)


@contextmanager
def _own_transaction(bind: Engine | Connection) -> Iterator[Connection]:
    with bind.engine.connect() as connection:
        if keeps_snapshot(connection):  # a row that changed during the wait would be a conflict
            connection.execution_options(isolation_level="READ COMMITTED")
        with connection.begin():
            yield connection
