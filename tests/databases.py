"""What tests ask a database server: what waits for a lock, and how long a session may. Both ORMs send the same SQL."""

from collections.abc import Callable
from typing import Any, Final

from tests.mysql_server import MYSQLD
from tests.waiting import until

Ask = Callable[[str], list[tuple[Any, ...]]]
"""Send a statement, in no transaction, and return its rows."""

WAITERS: Final = {
    "postgresql": "SELECT count(*) FROM pg_locks WHERE NOT granted",
    # innodb_trx keeps showing the same rows for a tenth of a second
    "mariadb": f"SELECT variable_value FROM {'performance' if MYSQLD else 'information'}_schema.global_status "
    "WHERE variable_name = 'INNODB_ROW_LOCK_CURRENT_WAITS'",
}
SET_LOCK_TIMEOUT: Final = {
    "postgresql": "SET lock_timeout = '77s'",
    "mariadb": "SET SESSION innodb_lock_wait_timeout = 77",
}
LOCK_TIMEOUT: Final = {"postgresql": "SHOW lock_timeout", "mariadb": "SELECT @@SESSION.innodb_lock_wait_timeout"}
SESSION_ID: Final = {"postgresql": "SELECT pg_backend_pid()", "mariadb": "SELECT connection_id()"}


def kill_session(server: str, number: int, ask: Ask) -> None:
    """Have the server end a session, and wait until it has."""
    if server == "postgresql":
        ask(f"SELECT pg_terminate_backend({number}, 10000)")
    else:
        ask(f"KILL {number}")
        until(lambda: not ask(f"SELECT 1 FROM information_schema.processlist WHERE id = {number}"))


def until_blocked(server: str, ask: Ask) -> None:
    """Wait until some session waits for a lock of another, as the server sees it."""
    until(lambda: int(ask(WAITERS[server])[0][0]))  # MariaDB shows its counters as text, and "0" is true


def seconds(answer: object) -> int:
    """Return the limit that `LOCK_TIMEOUT` has read, if it is the 77 seconds that `SET_LOCK_TIMEOUT` has set."""
    return int(str(answer).removesuffix("s").replace("1min 17", "77").replace("77000m", "77"))
