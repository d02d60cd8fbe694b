"""Leases in ZooKeeper (3.5 or newer)."""

from dlock_core.extras import needed_by

with needed_by("the ZooKeeper store"):
    import kazoo  # noqa: F401 - the modules of this package import it in their turn
