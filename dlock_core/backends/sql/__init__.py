"""How a store reaches its database: on separate AUTOCOMMIT connections, never in the caller's transaction.

An integration provides a `Connector`. A step is a plain blocking function of a `Connection`; there is one copy of it,
which runs in the caller's thread, in a thread for a task, or inside SQLAlchemy's greenlet.

    pool = Pool(connector)
    rows = await pool.step(runtime, name, lambda session: session.execute("SELECT :a", {"a": 1}))
    kept = await pool.dedicated(runtime, name)          # one connection that a holder keeps
    await kept.step(runtime, name, step); await kept.close(runtime)
"""

from dlock_core.backends.sql.connection import Connection, Connector, shut_socket, socket_of
from dlock_core.backends.sql.handover import Handover, handed_over
from dlock_core.backends.sql.pool import DedicatedConnection, Pool
from dlock_core.backends.sql.threads import in_threads, notifications, read_in_thread, within

__all__ = [
    "Connection",
    "Connector",
    "DedicatedConnection",
    "Handover",
    "Pool",
    "handed_over",
    "in_threads",
    "notifications",
    "read_in_thread",
    "shut_socket",
    "socket_of",
    "within",
]
