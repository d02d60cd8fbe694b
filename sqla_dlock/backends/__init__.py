"""Stores of leases in the database of an Engine or AsyncEngine: `database+postgresql+psycopg://…`."""
