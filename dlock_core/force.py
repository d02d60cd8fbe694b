"""End a lease from outside, as an operator does: never a newer one than was shown, and never unnoticed."""

from __future__ import annotations

import getpass
import logging
import os
import socket
from typing import TYPE_CHECKING

from dlock_core import hooks
from dlock_core.runtime import BLOCKING, run

if TYPE_CHECKING:
    from dlock_core.backend import Backend

__all__ = ["force_release", "operator"]

logger = logging.getLogger("dlock")


def force_release(backend: Backend, name: str, token: int, *, by: str, seconds: float = 0.0) -> bool:
    """End the grant with this token, and no newer one; False when it is not there (any more).

    Its holder learns of it at its next renewal, and cannot commit after that; until then the fence decides. `by` says
    who wanted it, `seconds` for how long it was held: for the log and the hooks (event "forced"). Raises
    BackendUnavailable when nobody knows whether it ended.
    """
    ended = run(backend.force_release(BLOCKING, name, token))
    if ended:
        logger.warning("dlock: lease of lock %r (token %d) was ended by %s", name, token, by)
        hooks.emit("forced", name, token, seconds, f"ended by {by}")
    return ended


def operator() -> str:
    """Name whoever runs this process: the user and the host."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # no name in a container: the number will do
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
