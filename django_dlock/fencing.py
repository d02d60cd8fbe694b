"""The fence in Django's databases: the table `dlock_fence`, or the protected row itself (`FencedMixin`)."""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

from django.db import DatabaseError, models, transaction
from django.db.models import F, Q

from django_dlock.errors import NotSupported, StaleToken, as_database_error
from django_dlock.row_sql import waiting
from dlock_core import fencing
from dlock_core.errors import StaleToken as CoreStaleToken
from dlock_core.fence_sql import DIALECTS
from dlock_core.guard import refusal
from dlock_core.parameters import pyformat
from dlock_core.runtime import run

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Mapping

    from django.db.backends.base.base import BaseDatabaseWrapper

    from dlock_core.fencing import Claim

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

    def admit(self, connection: BaseDatabaseWrapper, claim: Claim) -> None:
        """Admit the lease into the open transaction; raises StaleToken, RowLocked, SnapshotTooOld."""
        _run(fencing.admit, connection, claim)

    def prepare(self, connection: BaseDatabaseWrapper, claim: Claim) -> None:
        """Make the row, committed on its own, so that the first shared holders do not wait for each other."""
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
        self._raise(connection, claim, super().admit)

    def announce(self, connection: BaseDatabaseWrapper, claim: Claim) -> None:
        with transaction.atomic(using=connection.alias):  # a limit to the wait needs a transaction
            self._raise(connection, claim, super().announce)

    def confirm(self, connection: BaseDatabaseWrapper, claim: Claim) -> None:
        ours = self._rows(connection).filter(dlock_token=claim.token, dlock_holder=claim.holder)
        if not _limited(connection, claim, lambda: ours.update(dlock_holder=claim.holder)):
            self._raise(connection, claim, super().confirm)
            super().confirm(connection, claim)  # the row was made after the announce, which stands in the table

    def _raise(self, connection: BaseDatabaseWrapper, claim: Claim, table: Callable[..., None]) -> None:
        older = Q(dlock_token__lt=claim.token) | Q(dlock_token=claim.token, dlock_holder=claim.holder)
        rows = self._rows(connection).filter(older)
        values = {"dlock_token": claim.token, "dlock_holder": claim.holder}
        if not _limited(connection, claim, lambda: rows.update(**values)):
            self._refuse(connection, claim, table)

    def _refuse(self, connection: BaseDatabaseWrapper, claim: Claim, table: Callable[..., None]) -> None:
        rows = self._rows(connection).values_list("dlock_token", flat=True)
        if connection.vendor == "mysql":  # a plain read takes the transaction's snapshot, before the wait in the table
            rows = rows.select_for_update()
        highest = _limited(connection, claim, rows.first)
        if highest is not None:
            raise StaleToken(claim.name, token=claim.token, highest=highest)
        table(connection, claim)

    def _rows(self, connection: BaseDatabaseWrapper) -> models.QuerySet[Any]:
        return models.QuerySet(self.model).using(connection.alias).filter(pk=self.key)


def fence_for(parts: tuple[Any, ...]) -> TableFence:
    """Choose the fence of a lock by its parts: (Model, pk) of a `FencedMixin` model, or anything else."""
    if len(parts) == 2 and isinstance(parts[0], type) and issubclass(parts[0], FencedMixin):
        return RowFence(parts[0], parts[1])
    return _TABLE


class Cursor:
    """The port that `dlock_core.fencing` speaks to: one statement in the connection's transaction."""

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self._connection = connection

    async def execute(self, sql: str, params: Mapping[str, Any]) -> tuple[int, tuple[Any, ...] | None]:
        with self._connection.cursor() as cursor:
            cursor.execute(pyformat(sql), params)
            return cursor.rowcount, cursor.fetchone() if cursor.description else None


def dialect(connection: BaseDatabaseWrapper) -> fencing.Dialect:
    """Give the statements for a database; raises NotSupported where there is no fence (Oracle)."""
    vendor = "mariadb" if getattr(connection, "mysql_is_mariadb", False) else connection.vendor
    try:
        return DIALECTS[vendor]
    except KeyError:
        known = ", ".join(DIALECTS)
        raise NotSupported(f"no fence on {vendor}: use one of {known}, or pass fence=False") from None


def _run(step: Callable[..., Coroutine[Any, Any, None]], connection: BaseDatabaseWrapper, claim: Claim) -> None:
    words = dialect(connection)
    limit = claim.limit if words is DIALECTS["mysql"] else None  # the others say it in their statements
    with _explained(connection, claim), _waiting(connection, limit):
        run(step(Cursor(connection), words, claim))


def _limited(connection: BaseDatabaseWrapper, claim: Claim, query: Callable[[], T]) -> T:
    """Send a query of the protected row, waiting for its lock no longer than the claim allows."""
    with _explained(connection, claim), _waiting(connection, claim.limit):
        return query()


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


def _waiting(connection: BaseDatabaseWrapper, limit: float | None) -> AbstractContextManager[None]:
    if limit is None or not getattr(connection, "mysql_is_mariadb", False):
        return waiting(connection, None if limit is None else max(0.001, limit))  # 0 would be no limit
    prefix = f"SET STATEMENT innodb_lock_wait_timeout = {round(limit)} FOR "

    def limited(execute: Callable[..., Any], sql: str, *rest: Any) -> Any:
        return execute(prefix + sql, *rest)

    return connection.execute_wrapper(limited)
