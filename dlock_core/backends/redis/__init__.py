"""Leases in one Redis or Valkey, behind Sentinel, or in a Cluster."""

from dlock_core.backends.redis.backend import RedisBackend

__all__ = ["RedisBackend"]
