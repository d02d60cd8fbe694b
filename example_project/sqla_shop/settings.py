"""Settings of the shop, all from the environment: DATABASE_URL, REDIS_URL, SHOP_STRATEGY."""

import os
from pathlib import Path

DATABASE_URL = os.environ.get("DATABASE_URL") or f"sqlite:///{Path(__file__).parent / 'db.sqlite3'}"
REDIS_URL = os.environ.get("REDIS_URL")

# How orders are protected: one of the functions of strategies.py.
STRATEGY = os.environ.get("SHOP_STRATEGY") or ("lease" if REDIS_URL else "row")
if STRATEGY not in {"none", "row", "version", "lease"}:
    raise ValueError(f"SHOP_STRATEGY must be none, row, version or lease, not {STRATEGY!r}")
