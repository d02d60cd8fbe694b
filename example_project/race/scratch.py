"""Where a race takes place: the database and the Redis of the environment, or throw-away ones."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import quote

from dlock_core import DLockError, Lock, connect

from . import RaceFailed, Shop, servers


@contextmanager
def place(shop: Shop, *, with_redis: bool) -> Iterator[tuple[Path, str]]:
    """Prepare a database, and a Redis if wanted, and name them in the environment.

    Yields a directory for logs, and the name of the database.
    """
    with servers.scratch_folder() as directory, ExitStack() as stack:
        home = Path(directory)
        if not os.environ.get("DATABASE_URL"):
            os.environ["DATABASE_URL"] = f"sqlite:///{quote(str(home / 'race.sqlite3'))}"
        database = stack.enter_context(shop.database(os.environ["DATABASE_URL"]))
        if with_redis and not os.environ.get("REDIS_URL"):
            os.environ["REDIS_URL"] = stack.enter_context(servers.redis(home))
        elif with_redis:
            check_redis(os.environ["REDIS_URL"])
        yield home, database


def check_redis(url: str) -> None:
    try:
        Lock(connect(url), f"race:{os.getpid()}", wait=0).acquire().release()
    except (ValueError, ImportError, DLockError) as error:
        raise RaceFailed(f"REDIS_URL: {first_line(error)}") from None


def first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
