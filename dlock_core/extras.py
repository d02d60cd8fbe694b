"""Optional libraries: the error of a failed import names the extra, or the package, to install."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["MissingLibrary", "needed_by", "version"]

_EXTRAS: Final = {
    "asgiref": "django",
    "click": "cli",
    "django": "django",
    "greenlet": "sqlalchemy",
    "h11": "etcd",
    "kazoo": "zookeeper",
    "opentelemetry": "opentelemetry",
    "prometheus_client": "prometheus",
    "redis": "redis",
    "rest_framework": "rest",
    "rich": "cli",
    "sqlalchemy": "sqlalchemy",
}
_PACKAGES: Final = {"MySQLdb": "mysqlclient", "psycopg": "psycopg[binary]", "psycopg2": "psycopg2-binary"}
"""Packages whose module has another name."""
_OWN_PACKAGES: Final = ("dlock_core", "django_dlock", "sqla_dlock")


def _remedy(library: str) -> str:
    """Return the command that installs a library, given the name by which Python imports it."""
    extra = _EXTRAS.get(library)
    return f"pip install '{f'dlock-orm[{extra}]' if extra else _PACKAGES.get(library, library)}'"


class MissingLibrary(ModuleNotFoundError):
    """An optional library is not installed; the message says how to install it."""


def version() -> str:
    """Return the installed version of `dlock-orm`, the distribution of all three packages."""
    from importlib.metadata import version as installed

    return installed("dlock-orm")


@contextmanager
def needed_by(what: str) -> Iterator[None]:
    """Raise MissingLibrary if the block imports a library that is not installed.

    Args:
        what: The feature that needs the library, for the message, such as "metrics.install()".
    """
    try:
        yield
    except MissingLibrary:
        raise
    except ModuleNotFoundError as error:
        library = str(error.name).partition(".")[0]
        if error.name is None or library in _OWN_PACKAGES:
            raise
        reason = f"{what} needs the package {library!r}: {_remedy(library)}"
        raise MissingLibrary(reason, name=error.name) from error
