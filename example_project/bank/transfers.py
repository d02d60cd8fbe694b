"""Move money between accounts in two databases, with and without locks: read the two functions side by side.

A balance is read, and then written: a transfer that reads before another has committed overwrites what that one wrote.
Row locks would prevent it too, but could deadlock, since neither database sees the waits in the other. The two COMMITs
come one after the other: surviving a crash between them takes a record of the transfer, which no lock provides.
"""

from contextlib import ExitStack
from typing import NamedTuple

from django.db.transaction import atomic

from bank.models import Account
from django_dlock import lock


class Address(NamedTuple):
    """Where an account is."""

    database: str
    name: str


def unlocked(source: Address, target: Address, amount: int) -> None:
    """Read, and then write, each account."""
    move(source, -amount)
    move(target, amount)


def locked(source: Address, target: Address, amount: int) -> None:
    """Do the same with both accounts locked or none, so that A to B and B to A never deadlock."""
    locks = (lock("account", name, using=database, store=database) for database, name in (source, target))
    with lock(*locks, wait=None), ExitStack() as transactions:
        for database in sorted({source.database, target.database}):
            transactions.enter_context(atomic(using=database))
        unlocked(source, target, amount)


def move(account: Address, amount: int) -> None:
    row = Account.objects.using(account.database).get(name=account.name)
    row.balance += amount
    row.save(using=account.database)
