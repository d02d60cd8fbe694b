"""Names the extra of ours, or the package, that brings a library which is missing."""

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
"""What brings a module that is called otherwise."""
_OURS: Final = ("dlock_core", "django_dlock", "sqla_dlock")


def _remedy(library: str) -> str:
    """Return the command that installs what brings a library, by the name that Python imports it by."""
    extra = _EXTRAS.get(library)
    return f"pip install '{f'dlock-orm[{extra}]' if extra else _PACKAGES.get(library, library)}'"


class MissingLibrary(ModuleNotFoundError):
    """A library that is optional is not installed; the message says how to install it."""


def version() -> str:
    """Return the installed version of the distribution that all of our packages come in."""
    from importlib.metadata import version as installed

    return installed("dlock-orm")


@contextmanager
def needed_by(what: str) -> Iterator[None]:
    """Have a library that is missing inside the block be an error that says how to install it; `what` needs it.

    Raises MissingLibrary.
    """
    try:
        yield
    except MissingLibrary:
        raise
    except ModuleNotFoundError as error:
        library = str(error.name).partition(".")[0]
        if error.name is None or library in _OURS:
            raise
        reason = f"{what} needs the package {library!r}: {_remedy(library)}"
        raise MissingLibrary(reason, name=error.name) from error
