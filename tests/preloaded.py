"""Imports what the processes of tests need, once, before they are forked. Nothing here opens a connection or starts a thread."""

# ruff: noqa: E402, F401 - imported to be there; Django has to be set up before its integration is imported
import contextlib
import os

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
django.setup()

import asyncpg
import django.db.backends.postgresql.base
import django.db.backends.sqlite3.base
import django.test
import psycopg
import pymysql
import pytest
import redis.asyncio
import sqlalchemy.dialects.mysql.pymysql
import sqlalchemy.dialects.postgresql.asyncpg
import sqlalchemy.dialects.postgresql.psycopg
import sqlalchemy.ext.asyncio
from django.core.exceptions import ImproperlyConfigured

import django_dlock
import dlock_core.backends.redis
import sqla_dlock

with contextlib.suppress(ImproperlyConfigured):  # Without mysqlclient, Django raises this.
    import django.db.backends.mysql.base
