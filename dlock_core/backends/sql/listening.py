"""Reads PostgreSQL's notifications from psycopg's connections, in a thread where nothing else would read them."""

from __future__ import annotations

import select
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlock_core.backends.sql.port import Session

__all__ = ["notifications", "read_in_thread"]


def read_in_thread(session: Session, heard: Callable[[str], None], ended: Callable[[], None]) -> None:
    """Tell of each notification that comes on the session, which nobody else uses any more, until it is cut."""
    args = (session, heard, ended)
    threading.Thread(target=_read, args=args, name="dlock-database-listen", daemon=True).start()


def _read(session: Session, heard: Callable[[str], None], ended: Callable[[], None]) -> None:
    with suppress(Exception):  # whatever it is, it has ended
        coming = select.poll()  # select() knows no file above number 1023
        coming.register(session.driver, select.POLLIN)
        while True:
            coming.poll()
            for payload in notifications(session.driver):
                heard(payload)
    session.close()
    ended()


def notifications(driver: Any) -> list[str]:
    """Take what has come in; raises the driver's error when the connection has ended."""
    if hasattr(driver, "pgconn") and hasattr(driver.pgconn, "consume_input"):
        driver.pgconn.consume_input()
        return [notify.extra.decode() for notify in iter(driver.pgconn.notifies, None)]
    driver.poll()  # psycopg2
    found, driver.notifies[:] = list(driver.notifies), []
    return [notify.payload for notify in found]
