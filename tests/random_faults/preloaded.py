"""Modules that a run's processes need, imported once before the fork. None opens a connection or starts a thread."""

# ruff: noqa: F401 - imported to be there
import asyncpg
import django.contrib.contenttypes
import django.core.cache
import django.db.backends.postgresql.base
import django.db.backends.sqlite3.base
import kazoo.client
import psycopg
import pymysql
import redis.asyncio
import sqlalchemy.dialects.mysql.pymysql
import sqlalchemy.dialects.postgresql.asyncpg
import sqlalchemy.dialects.postgresql.psycopg
import sqlalchemy.ext.asyncio
import uvicorn

import django_dlock
import dlock_core.backends.etcd
import dlock_core.backends.redis
import dlock_core.backends.redlock
import dlock_core.backends.zookeeper
import sqla_dlock
import sqla_dlock.backends.advisory
import sqla_dlock.backends.table
from tests.random_faults import core_clients, django_clients, holder, runner, sqla_clients, worker

if django_clients.HAS_MYSQLCLIENT:
    import django.db.backends.mysql.base
