"""The fence in Django's databases: the table `dlock_fence`, or the protected row itself (`FencedMixin`)."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

from django.db import DatabaseError, models, transaction
from django.db.models import F

from django_dlock.errors import NotSupported, as_database_error
from django_dlock.row_sql import waiting
from dlock_core.errors import StaleToken as CoreStaleToken
from dlock_core.runtime import run
from dlock_core.sql.database import pyformat
from dlock_core.transactions import fence_sql, fencing
from dlock_core.transactions.fence_sql import DIALECTS
from dlock_core.transactions.fencing import refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Mapping

    from django.db.backends.base.base import BaseDatabaseWrapper

    from dlock_core.transactions.fencing import Claim

__all__ = ["Cursor", "FencedMixin", "RowFence", "TableFence", "dialect", "fence_for"]

T = TypeVar("T")


if TYPE_CHECKING:
    _BigIntegerField = models.BigIntegerField[int, int]
    _CharField = models.CharField[str, str]
else:
    _BigIntegerField, _CharField = models.BigIntegerField, models.CharField


class FenceTokenField(_BigIntegerField):
    """The token of the newest holder; only the fence changes it, `save()` leaves it as it is in the database."""

    def pre_save(self, model_instance: models.Model, add: bool) -> Any:  # noqa: FBT001 - Django's form
        return super().pre_save(model_instance, add) if add else F(self.attname)


class FenceHolderField(_CharField):
    """The newest holder; only the fence changes it, `save()` leaves it as it is in the database."""

    def pre_save(self, model_instance: models.Model, add: bool) -> Any:  # noqa: FBT001 - Django's form
        return super().pre_save(model_instance, add) if add else F(self.attname)


class FencedMixin(models.Model):
    """A model whose rows carry the fence themselves: `lock(Order, pk)` admits its token with one UPDATE of that row.

    It guards, and locks, the row instead of one in `dlock_fence`; a row that does not exist yet is guarded there.
    It does not know shared locks. A row that was deleted and made anew has forgotten its newest holder.
    """

    dlock_token = FenceTokenField(default=0, db_default=0, editable=False)
    dlock_holder = FenceHolderField(max_length=32, default="", db_default="", editable=False)

    class Meta:
        abstract = True


class TableFence:
    """The row of a lock in `dlock_fence`."""

    supports_shared = True

    def admit(self, connection: BaseDatabaseWrapper, claim: Claim) -> int | None:
        """Admit the lease into the open transaction; raises StaleToken, RowLocked, SnapshotTooOld."""
        return _run(fencing.admit, connection, claim)

    def prepare(self, connection: BaseDatabaseWrapper, claim: Claim) -> None:
        """Leave the mark of shared holders, committed on its own, so that they do not wait for each other."""
        _run(fencing.prepare, connection, claim)

    def announce(self, connection: BaseDatabaseWrapper, claim: Claim) -> None:
        """Raise the row, committed on its own, for a lease of several transactions; raises StaleToken, RowLocked."""
        _run(fencing.announce, connection, claim)

    def confirm(self, connection: BaseDatabaseWrapper, claim: Claim) -> None:
        """Prove just before COMMIT that nobody newer was announced; raises StaleToken, RowLocked."""
        _run(fencing.confirm, connection, claim)


_TABLE: Final = TableFence()


class RowFence(TableFence):
    """The fence columns of one row of a `FencedMixin` model."""

    supports_shared = False

    def __init__(self, model: type[FencedMixin], key: Any) -> None:
        self.key = model._meta.pk.get_prep_value(key)
        self.model = model._meta.get_field("dlock_token").model  # a child's UPDATE would first SELECT, and then be late

    def admit(self, connection: BaseDatabaseWrapper, claim: Claim) -> None:
        self._run(fence_sql.admit, connection, claim)

    def announce(self, connection: BaseDatabaseWrapper, claim: Claim) -> None:
        with transaction.atomic(using=connection.alias):  # the row, and the table in its place, are raised together
            self._run(fence_sql.admit, connection, claim)

    def confirm(self, connection: BaseDatabaseWrapper, claim: Claim) -> None:
        self._run(fence_sql.confirm, connection, claim)

    def _run(
        self, step: Callable[..., Coroutine[Any, Any, None]], connection: BaseDatabaseWrapper, claim: Claim
    ) -> None:
        key: Any = self.model._meta.pk
        port = Cursor(connection, key=key.get_db_prep_value(self.key, connection))
        quoted = connection.ops.quote_name
        condition = f"{quoted(key.column)} = :key"
        words = fence_sql.statements(_database(connection), quoted(self.model._meta.db_table), condition)
        with _limited(connection, claim):
            run(step(fence_sql.Row(port, words, dialect(connection)), claim))


def fence_for(parts: tuple[Any, ...]) -> TableFence:
    """Choose the fence of a lock by its parts: (Model, pk) of a `FencedMixin` model, or anything else."""
    if len(parts) == 2 and isinstance(parts[0], type) and issubclass(parts[0], FencedMixin):
        return RowFence(parts[0], parts[1])
    return _TABLE


class Cursor:
    """The port that `dlock_core.transactions.fencing` speaks to: one statement in the connection's transaction."""

    def __init__(self, connection: BaseDatabaseWrapper, **more: Any) -> None:
        self._connection, self._more = connection, more

    async def execute(self, sql: str, params: Mapping[str, Any]) -> tuple[int, tuple[Any, ...] | None]:
        with self._connection.cursor() as cursor:
            cursor.execute(pyformat(sql), {**params, **self._more})
            return cursor.rowcount, cursor.fetchone() if cursor.description else None


def dialect(connection: BaseDatabaseWrapper) -> fencing.Dialect:
    """Give the statements for a database; raises NotSupported where there is no fence (Oracle)."""
    try:
        return DIALECTS[_database(connection)]
    except KeyError:
        known = ", ".join(DIALECTS)
        raise NotSupported(f"no fence on {connection.vendor}: use one of {known}, or pass fence=False") from None


def _database(connection: BaseDatabaseWrapper) -> str:
    return "mariadb" if getattr(connection, "mysql_is_mariadb", False) else connection.vendor


def _run(step: Callable[..., Coroutine[Any, Any, T]], connection: BaseDatabaseWrapper, claim: Claim) -> T:
    with _limited(connection, claim):
        return run(step(Cursor(connection), dialect(connection), claim))


@contextmanager
def _limited(connection: BaseDatabaseWrapper, claim: Claim) -> Iterator[None]:
    """Have the block wait no longer than the claim allows where its statements cannot say it themselves."""
    limit = claim.limit if _database(connection) == "mysql" else None
    with _explained(connection, claim), waiting(connection, None if limit is None else max(0.001, limit)):
        yield  # 0 would be no limit


@contextmanager
def _explained(connection: BaseDatabaseWrapper, claim: Claim) -> Iterator[None]:
    """Say what an error of the database means here; any other stays as it is, to be told by its driver's code."""
    try:
        yield
    except CoreStaleToken as error:
        raise as_database_error(error) from None
    except DatabaseError as error:
        meant = refusal(error, claim, connection.vendor)
        if meant is None:
            raise
        raise as_database_error(meant) from error
