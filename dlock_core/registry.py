"""Find the backend for a URL: `connect("redis://…")`.

Third-party backends register a factory under their URL scheme in the entry point group `dlock.backends`.
"""

from __future__ import annotations

import re
from importlib import import_module
from importlib.metadata import entry_points
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, cast

if TYPE_CHECKING:
    from dlock_core.backend import Backend

__all__ = ["connect", "scheme_of", "schemes"]

_OWN: Final = {
    "memory": "dlock_core.backends.memory:MemoryBackend.from_url",
    "redis": "dlock_core.backends.redis:RedisBackend.from_url",
    "rediss": "dlock_core.backends.redis:RedisBackend.from_url",
    "unix": "dlock_core.backends.redis:RedisBackend.from_url",
    "redis+sentinel": "dlock_core.backends.redis:RedisBackend.from_sentinel",
    "rediss+sentinel": "dlock_core.backends.redis:RedisBackend.from_sentinel",
    "redis+cluster": "dlock_core.backends.redis.cluster:ClusterBackend.from_url",
    "rediss+cluster": "dlock_core.backends.redis.cluster:ClusterBackend.from_url",
    "redlock": "dlock_core.backends.redlock:RedlockBackend.from_url",
    "zookeeper": "dlock_core.backends.zookeeper:ZooKeeperBackend.from_url",
    "etcd": "dlock_core.backends.etcd:EtcdBackend",
    "etcds": "dlock_core.backends.etcd:EtcdBackend",
}

_OURS: Final = ("dlock_core.", "sqla_dlock.")
_IN_DATABASES: Final = ("database", "advisory")
_IN_DATABASES_INSTEAD: Final = (
    "is reached by what reaches your database: in Django name the store in the setting DLOCK, in SQLAlchemy give it to "
    "sqla_dlock.configure(), or write the URL of an engine behind the store's scheme"
)
"""The core knows neither aliases nor engines."""
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")


def connect(store: Any, **options: Any) -> Backend:
    """Make the backend for a store: a URL, or an existing redis-py client or connection pool.

    Nothing is sent yet. Raises ValueError for a URL or option that is wrong, ImportError when the client library is
    missing (it says which extra to install). A password in the URL appears in no error.
    """
    if not isinstance(store, str):
        return _of_client(store, options)
    scheme = scheme_of(store)
    family, _, engine = scheme.partition("+")
    if family in _IN_DATABASES and not engine:
        raise ValueError(f"{family}:// {_IN_DATABASES_INSTEAD}: {family}+postgresql+psycopg://user@host/database")
    known_elsewhere = _entry_points()
    factory = _OWN.get(scheme) or known_elsewhere.get(scheme) or known_elsewhere.get(family)
    if factory is None:
        known = ", ".join(f"{name}://" for name in schemes())
        raise ValueError(f"no lock store for the URL scheme {scheme!r}: use one of {known}")
    return cast("Backend", _load(factory)(store, **options))


def scheme_of(url: str) -> str:
    """Give the scheme of a URL, an empty text if it has none; urlsplit would quote the password of some in an error."""
    found = _SCHEME.match(url)
    return found[1].lower() if found else ""


def schemes() -> list[str]:
    """List the URL schemes for which there is a backend."""
    return sorted({*_OWN, *_entry_points()})


def _of_client(client: Any, options: dict[str, Any]) -> Backend:
    if not any(kind.__module__.startswith(("redis", "valkey")) for kind in type(client).__mro__):
        raise TypeError(f"a store is a URL or a redis-py client, not {type(client).__name__}")
    kind = "redis.cluster:ClusterBackend" if hasattr(client, "nodes_manager") else "redis:RedisBackend"
    return cast("Backend", _load(f"dlock_core.backends.{kind}")(client, **options))


def _entry_points() -> dict[str, str]:
    return {point.name: point.value for point in entry_points(group="dlock.backends")}


def _load(path: str) -> Any:
    module, _, names = path.partition(":")
    try:
        found = import_module(module)
    except ModuleNotFoundError as error:
        missing = str(error.name).partition(".")[0]
        remedy = f"pip install 'dlock-orm[{missing}]'" if module.startswith(_OURS) else "install it"
        raise ImportError(f"the store {path} needs the package {missing!r}: {remedy}") from error
    try:
        return attrgetter(names)(found)
    except AttributeError as error:
        raise ImportError(f"an entry point of the group dlock.backends leads nowhere: {path}") from error
