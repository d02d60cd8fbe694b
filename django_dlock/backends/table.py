"""`database://alias`: leases in the table `dlock_lease` of a DATABASES alias."""

from __future__ import annotations

from django_dlock.backends.connector import pool_of
from dlock_core.backends.table.backend import TableBackend

__all__ = ["from_url"]


def from_url(url: str, *, timeout: float = 5.0) -> TableBackend:
    """Return the store of a URL such as "database://default"; `timeout` bounds each step, in seconds."""
    return TableBackend(pool_of(url.partition("://")[2], timeout=timeout))
