"""Count how far a reader walks through the code: `python -m tests.walks`.

Each walk is one call that users make every day, traced line by line on a real Redis and SQLite after a warm-up. A *module*
is a file of ours in which a line ran, a *move* is a step from a line of one file to a line of another. The fewer of
both, the sooner a reader understands the path.
"""

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from tests import servers, settings

ROOT = Path(__file__).parent.parent
PACKAGES = tuple(f"{ROOT / name}/" for name in ("dlock_core", "django_dlock", "sqla_dlock"))


class Walk:
    """The files and functions through which one call went."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self.functions: set[tuple[str, str]] = set()
        self.lines = 0

    def trace(self, frame: FrameType, event: str, argument: object) -> Any:
        path = frame.f_code.co_filename
        if not path.startswith(PACKAGES):
            return None
        if event == "line":
            self.lines += 1
            self.functions.add((path, frame.f_code.co_qualname))
            if not self.files or self.files[-1] != path:
                self.files.append(path)
        return self.trace

    def __str__(self) -> str:
        moves = max(0, len(self.files) - 1)
        return f"{len(set(self.files)):7} {moves:6} {len(self.functions):10} {self.lines:6}"


def walk(call: Callable[[], object], *, warm: int = 3) -> Walk:
    for _ in range(warm):
        call()
    found = Walk()
    sys.settrace(found.trace)
    try:
        call()
    finally:
        sys.settrace(None)
    return found


def walks(url: str) -> dict[str, Callable[[], object]]:
    """Make the tables, connect the stores, and return the walks."""
    import django
    from django.conf import settings as configured

    configured.DLOCK = {"default": {"BACKEND": url}}
    django.setup()

    from django.core.management import call_command
    from django.db import transaction
    from sqlalchemy import create_engine, select
    from sqlalchemy.orm import Session

    import sqla_dlock
    from django_dlock import lock
    from dlock_core import AsyncLock, Lock, connect
    from sqla_dlock.fencing import metadata as fence
    from tests.sqla_dlock.models import Base, Counter
    from tests.sqla_dlock.version_models import Base as VersionedBase
    from tests.testapp.models import Article
    from tests.testapp.models import Counter as DjangoCounter

    call_command("migrate", run_syncdb=True, verbosity=0)
    article = Article.objects.create(title="a")
    engine = create_engine(f"sqlite:///{settings.TEST_DIRECTORY}/walks.sqlite3")
    for each in (fence, Base.metadata, VersionedBase.metadata):
        each.create_all(engine)
    sqla_dlock.configure(default=url)
    backend = connect(url)

    def core() -> None:
        with Lock(backend, "walk:1"):
            pass

    async def a_core() -> None:
        async with AsyncLock(backend, "walk:2"):
            pass

    def django_lock() -> None:
        with lock("order", 1), transaction.atomic():
            DjangoCounter.objects.filter(pk=1).first()

    def django_lock_inside() -> None:
        with transaction.atomic(), lock("order", 1):
            DjangoCounter.objects.filter(pk=1).first()

    def sqla_lock() -> None:
        with Session(engine) as session, sqla_dlock.lock(session, "order", 2):
            session.scalars(select(Counter)).first()
            session.commit()

    session = Session(engine)
    held = sqla_dlock.lock(session, "order", 3, reentrant=True)

    def sqla_tie() -> None:
        session.scalars(select(Counter)).first()
        session.commit()

    def under_a_lease() -> object:
        with held:
            return walk(sqla_tie)

    return {
        "core: with Lock(backend, name)": lambda: walk(core),
        "core: async with AsyncLock(backend, name)": lambda: walk(lambda: asyncio.run(a_core())),
        "Django: with lock(...), atomic(): a query": lambda: walk(django_lock),
        "Django: with atomic(), lock(...): a query": lambda: walk(django_lock_inside),
        "Django: save_with_version()": lambda: walk(article.save_with_version),
        "SQLAlchemy: with lock(session, ...): a query, commit": lambda: walk(sqla_lock),
        "SQLAlchemy: the tie alone, a query and commit under a lease": under_a_lease,
    }


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    server = servers.redis(Path(settings.TEST_DIRECTORY) / "walks")
    server.start()
    try:
        sys.stdout.write(f"{'modules':>7} {'moves':>6} {'functions':>10} {'lines':>6}\n")
        for title, take in walks(server.url).items():
            sys.stdout.write(f"{take()}  {title}\n")
    finally:
        server.stop()


if __name__ == "__main__":
    main()
