"""Leases in a Redis Cluster."""
