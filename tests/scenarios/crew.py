"""Other processes that add to the counter of an application; they outlive a test, because the start of each costs a second of work."""

from __future__ import annotations

import contextlib
import random
import threading
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final

from dlock_core import connect
from dlock_core.errors import DLockError
from dlock_core.transactions.retry import is_conflict
from tests.chaos import Dice
from tests.processes import Worker
from tests.scenarios.places import open_application
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.processes import Link
    from tests.scenarios.application import Application, Place, Session

SECONDS: Final = 1.5
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 0.4


class Crew:
    """Workers that do one job after another."""

    def __init__(self) -> None:
        self._workers: list[Worker] = []

    def start(self, job: Callable[..., object], *args: Any) -> Worker:
        """Start a job with a worker that is idle; `end(worker)` waits for its result, and makes it idle again."""
        self._workers = [worker for worker in self._workers if worker.process.is_alive()]
        idle = next((worker for worker in self._workers if not getattr(worker, "is_busy", False)), None)
        if idle is None:
            idle = Worker(serve)
            self._workers.append(idle)
        idle.is_busy = True  # type: ignore[attr-defined]
        idle.say((job, args))
        return idle

    def end(self, worker: Worker) -> Any:
        """Wait for the result of the job."""
        kind, found = worker.hear()
        assert kind == "result", kind
        worker.is_busy = False  # type: ignore[attr-defined]
        return found

    def tidy_up(self) -> None:
        """Kill the workers that a failed test has left busy."""
        for worker in self._workers:
            if getattr(worker, "is_busy", False):
                with contextlib.suppress(ProcessLookupError):
                    worker.resume()
                worker.kill()

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()
            worker.pipe.close()


def serve(link: Link) -> None:
    """Do jobs for as long as the test runs."""
    while True:
        job, args = link.expect("word", within=3600)
        link.say(("result", job(link, *args)))


# The jobs


def add_one(link: Link, place: Place, url: str, form: Any, pause_at: str) -> str:
    """Add one to the counter, pausing at one point until the test says to go on; return how it ended."""

    def point(name: str) -> None:
        if name == pause_at:
            link.say(name)
            link.hear()

    with closing(open_application(place)) as application:
        application.use_store(connect(url), ttl=2.0)
        session = application.session()
        try:
            with session.lock("order", 42, fence=form, wait=20):
                point("granted")
                with session.transaction():
                    seen = session.read()
                    point("read")
                    session.write(seen + 1)
                    point("written")
        except DLockError as error:
            return type(error).__name__
        finally:
            session.close()
    return "done"


def add(session: Session) -> None:
    with session.transaction():
        session.write(session.read() + 1)


def post(session: Session) -> None:
    with session.transaction():
        session.add_one()


def close(session: Session) -> None:
    """Read in one transaction, and write in the next."""
    with session.transaction():
        seen = session.read()
    with session.transaction():
        session.write(seen + 1)


def work_until_told(
    link: Link, place: Place, url: str | None, work: Callable[[Session], None], options: dict[str, Any]
) -> int:
    """Work under the lock until told to stop, and return how often that was committed; without a URL, tokens are random."""
    done = 0
    with closing(open_application(place)) as application:
        application.use_store(connect(url) if url else Dice(), ttl=0.2)
        session = application.session()
        with session.transaction():
            session.read()
        link.say("ready")
        while not link.pipe.poll():
            done += is_committed(work, session, options)
        link.hear()
        session.close()
    return done


def is_committed(work: Callable[[Session], None], session: Session, options: dict[str, Any]) -> bool:
    """Do work under the lock, and return whether it was committed; a refusal or a conflict is no error."""
    try:
        with session.lock("order", 42, wait=1, **options):
            work(session)
    except Exception as error:
        if not isinstance(error, DLockError) and not is_conflict(error):
            raise
        return False
    return True


# What the test does to the workers


def stop_at_random(crew: Crew, workers: Sequence[Worker], application: Application) -> int:
    """Let workers run, with one of them stopped most of the time; return how often they have committed.

    They go on until one of them has committed: on a busy machine that can take longer than everything else here.
    """
    draw, over = random.Random(4711), threading.Event()
    for worker in workers:
        assert worker.hear() == "ready"
    timer = threading.Timer(SECONDS, over.set)
    timer.start()
    while not over.is_set():
        worker = draw.choice(workers)
        worker.pause()
        over.wait(draw.uniform(SHORTEST_PAUSE_S, LONGEST_PAUSE_S))
        worker.resume()
        over.wait(SHORTEST_PAUSE_S)
    until(lambda: application.value() > 0)
    for worker in workers:
        worker.say("stop")
    return sum(crew.end(worker) for worker in workers)
