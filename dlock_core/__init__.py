"""Leases, fencing, versions and row locks: the part that knows no framework."""
