"""Settings of the shop under load: those of the example, with a shorter wait for a lock."""

import os

from shopsite.settings import *  # noqa: F403
from shopsite.settings import DLOCK

DLOCK["default"]["WAIT"] = float(os.environ.get("LOAD_WAIT", "10"))
