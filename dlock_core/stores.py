"""Stores by URL or by name: `connect`, default options, and the forced release of a lease."""

from __future__ import annotations

import inspect
import logging
import os
import re
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, cast

from dlock_core.extras import needed_by
from dlock_core.names import canonical
from dlock_core.observability import hooks
from dlock_core.options import unknown_store_option
from dlock_core.runtime import BLOCKING, run

if TYPE_CHECKING:
    from dlock_core.backend import Backend

__all__ = ["DEFAULT_TTL_S", "DEFAULT_WAIT_S", "Store"]

DEFAULT_TTL_S: Final = 30.0
DEFAULT_WAIT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Store:
    """A backend and the defaults of its locks: `ttl` and `wait` in seconds; `wait=None` means no limit."""

    alias: str
    backend: Backend
    ttl: float = DEFAULT_TTL_S
    wait: float | None = DEFAULT_WAIT_S


_OWN_FACTORIES: Final = {
    "memory": "dlock_core.backends.memory:MemoryBackend.from_url",
    "redis": "dlock_core.backends.redis.backend:RedisBackend.from_url",
    "rediss": "dlock_core.backends.redis.backend:RedisBackend.from_url",
    "unix": "dlock_core.backends.redis.backend:RedisBackend.from_url",
    "redis+sentinel": "dlock_core.backends.redis.backend:RedisBackend.from_sentinel",
    "rediss+sentinel": "dlock_core.backends.redis.backend:RedisBackend.from_sentinel",
    "redis+cluster": "dlock_core.backends.redis.cluster:ClusterBackend.from_url",
    "rediss+cluster": "dlock_core.backends.redis.cluster:ClusterBackend.from_url",
    "redlock": "dlock_core.backends.redlock.backend:RedlockBackend.from_url",
    "zookeeper": "dlock_core.backends.zookeeper.backend:ZooKeeperBackend.from_url",
    "etcd": "dlock_core.backends.etcd.backend:EtcdBackend",
    "etcds": "dlock_core.backends.etcd.backend:EtcdBackend",
}

_DATABASE_FAMILIES: Final = ("database", "advisory")
_DATABASE_ADVICE: Final = (
    "needs a connection to your database: in Django name the store in the setting DLOCK, in SQLAlchemy pass an engine "
    "to sqla_dlock.configure(), or append the engine's URL to the store's scheme"
)
"""The core has neither aliases nor engines."""
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")


def connect(store: Any, **options: Any) -> Backend:
    """Return the backend for a store: a URL, or an existing redis-py client or connection pool.

    Nothing is sent yet. Raises ValueError for a wrong URL or option, TypeError for an unknown option, ImportError if
    the client library is missing (its text names the extra to install). No error contains a password from the URL.
    """
    if not isinstance(store, str):
        return _of_client(store, options)
    scheme = scheme_of(store)
    family, _, engine = scheme.partition("+")
    if family in _DATABASE_FAMILIES and not engine:
        raise ValueError(f"{family}:// {_DATABASE_ADVICE}: {family}+postgresql+psycopg://user@host/database")
    factory = _OWN_FACTORIES.get(scheme) or _factory_elsewhere(scheme, family)
    if factory is None:
        known = ", ".join(f"{name}://" for name in schemes())
        raise ValueError(f"no lock store for the URL scheme {scheme!r}: use one of {known}")
    with needed_by(f"a store with the URL scheme {scheme}://"):
        return _made(_load(factory), store, options)


def scheme_of(url: str) -> str:
    """Return the scheme of a URL, or an empty text; urlsplit would quote the password of some URLs in an error."""
    found = _SCHEME.match(url)
    return found[1].lower() if found else ""


def schemes() -> list[str]:
    """Return the URL schemes for which there is a backend."""
    return sorted({*_OWN_FACTORIES, *_entry_points()})


def _of_client(client: Any, options: dict[str, Any]) -> Backend:
    if not any(kind.__module__.startswith(("redis", "valkey")) for kind in type(client).__mro__):
        raise TypeError(f"a store is a URL or a redis-py client, not {type(client).__name__}")
    kind = "redis.cluster:ClusterBackend" if hasattr(client, "nodes_manager") else "redis.backend:RedisBackend"
    return _made(_load(f"dlock_core.backends.{kind}"), client, options)


def _made(factory: Any, store: Any, options: dict[str, Any]) -> Backend:
    """Call the factory of a kind of store; raises TypeError for an option that it does not take."""
    known = _option_names(factory) if options else None
    unknown = () if known is None else [name for name in options if name not in known]
    if known is not None and unknown:
        raise unknown_store_option(unknown[0], known)
    return cast("Backend", factory(store, **options))


def _option_names(factory: Any) -> list[str] | None:
    """Return the options of a factory, including those that a class method passes on to its class; None means any."""
    options = list(inspect.signature(factory).parameters.values())[1:]
    names = [each.name for each in options if each.kind is not each.VAR_KEYWORD]
    if len(names) == len(options):
        return names
    kind = getattr(factory, "__self__", None)
    more = _option_names(kind) if isinstance(kind, type) else None
    return None if more is None else names + more


def _factory_elsewhere(scheme: str, family: str) -> str | None:
    known = _entry_points()
    return known.get(scheme) or known.get(family)


def _entry_points() -> dict[str, str]:
    from importlib import metadata  # loads a dozen modules that most programs do not need

    return {point.name: point.value for point in metadata.entry_points(group="dlock.backends")}


def _load(path: str) -> Any:
    module, _, names = path.partition(":")
    with needed_by(f"the store {path}"):
        found = import_module(module)
    try:
        return attrgetter(names)(found)
    except AttributeError as error:
        raise ImportError(
            f"an entry point of the group dlock.backends names something that does not exist: {path}"
        ) from error


logger = logging.getLogger("dlock")


def force_release(backend: Backend, name: str, token: int, *, by: str, seconds: float = 0.0) -> bool:
    """End the grant with this token, and no newer one; return False if it does not exist (any more).

    The holder notices at its next renewal, and cannot commit after that; until then the fence decides. `by` names the
    operator and `seconds` is how long the lease was held: both are for the log and the hooks (event "forced"). Raises
    BackendUnavailable if it is unknown whether the lease ended, and TypeError or ValueError, before anything is sent,
    for what is no name or no token.
    """
    name = canonical(name)
    if isinstance(token, bool) or not isinstance(token, int):
        raise TypeError(f"token is the integer of a lease, not {type(token).__name__}: {token!r:.80}")
    ended = run(backend.force_release(BLOCKING, name, token))
    if ended:
        logger.warning("dlock: lease of lock %r (token %d) was ended by %s", name, token, by)
        hooks.emit("forced", name, token, seconds, f"ended by {by}")
    return ended


def operator() -> str:
    """Return the user and the host of this process."""
    import getpass
    import socket

    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # no name in a container: use the number
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
