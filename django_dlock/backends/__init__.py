"""Stores of leases in Django's own databases: `database://alias`."""
