"""Holds one lock in each of the given stores, reports that in a file, and waits to be killed."""

import json
import time
from pathlib import Path

from dlock_core import Lock
from tests.random_faults.core_clients import backends
from tests.random_faults.items import STORES


def main(config: str, said: str, *stores: str) -> None:
    made = backends(json.loads(Path(config).read_text()), list(stores))
    leases = [Lock(made[store], f"dead:{store}", ttl=STORES[store].ttl, wait=5).acquire() for store in stores]
    Path(said).write_text(f"{len(leases)}")
    time.sleep(60)
