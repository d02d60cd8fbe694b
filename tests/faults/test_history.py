"""The history of many processes and one lock shows no overlap, repeated token or overtaking; the checker works."""

import json
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from dlock_core.backends.redis.backend import RedisBackend
from dlock_core.runtime import BLOCKING, run
from tests import processes
from tests.faults.history import Section, overlaps, overtaken, read, repeated_tokens, work
from tests.servers import Server
from tests.waiting import until


def play(
    server: Server, prefix: str, path: Path, workers: int, rounds: int, options: dict[str, Any] | None
) -> list[Section]:
    processes.run(work, [(server.url, prefix, str(path), rounds, options)] * workers)
    return read(path)


def test_sections_of_many_processes_are_apart_in_the_order_of_tokens_and_of_arrival(
    any_redis: Server, prefix: str, tmp_path: Path
) -> None:
    history = play(any_redis, prefix, tmp_path / "history", workers=6, rounds=100, options={})
    assert len(history) == 600
    assert len({section.process for section in history}) == 6
    assert any(section.queued for section in history), "nobody had to wait: nothing was tested"
    assert overlaps(history) == []
    assert repeated_tokens(history) == []
    assert overtaken(history) == []


def test_without_a_lock_the_checker_finds_overlaps(redis_server: Server, prefix: str, tmp_path: Path) -> None:
    history = play(redis_server, prefix, tmp_path / "history", workers=4, rounds=500, options=None)
    assert overlaps(history)


@pytest.mark.parametrize("renew", [True, False])
def test_processes_that_are_stopped_and_killed_never_overlap_with_those_that_follow(
    redis_server: Server, direct: RedisBackend, prefix: str, tmp_path: Path, renew: bool
) -> None:
    """The current holder is stopped for longer than its ttl several times; then two holders are killed."""
    path, options = tmp_path / "history", {"ttl": 0.3, "renew": renew}
    arguments = (redis_server.url, prefix, str(path), 100_000, options, 0.02)
    with ExitStack() as stack:
        workers = [stack.enter_context(processes.worker(work, *arguments)) for _ in range(5)]
        for _ in range(6):
            one = inside(direct, workers)
            one.pause()
            threading.Event().wait(0.5)
            one.resume()
        for _ in range(2):
            one = inside(direct, workers)
            one.kill()
            workers.remove(one)
        before = len(read(path))
        until(lambda: len(read(path)) >= before + 30)
        for one in workers:
            one.kill()
    history = read(path)
    assert overlaps(history) == []
    assert repeated_tokens(history) == []


def inside(store: RedisBackend, workers: list[processes.Worker]) -> processes.Worker:
    """Return the worker that holds the lock now; that it may be another a moment later does no harm."""
    by_pid = {one.process.pid: one for one in workers}
    while True:
        (state,) = run(store.inspect(BLOCKING, "a"))
        for holder in state.holders:
            pid = json.loads(holder.owner)["pid"]
            if pid in by_pid:
                return by_pid[pid]


def section(token: int, begin: float, end: float, asked: float = 0.0, queued: float | None = None) -> Section:
    return Section(asked, queued, begin, end, token, 1)


def test_checker_finds_what_is_wrong_and_only_that() -> None:
    apart = [section(1, 0, 1), section(2, 1, 2), section(3, 2, 3)]
    assert (overlaps(apart), repeated_tokens(apart), overtaken(apart)) == ([], [], [])
    assert overlaps([section(1, 0, 1.5), section(2, 1, 2)])
    assert overlaps([section(1, 1, 2), section(2, 0, 1)]), "tokens against the order of time"
    assert repeated_tokens([section(1, 0, 1), section(1, 1, 2)]) == [1]
    assert overtaken([section(1, 5, 6, asked=3), section(2, 6, 7, asked=1, queued=2)])
    assert overtaken([section(1, 5, 6, asked=1.5), section(2, 6, 7, asked=1, queued=2)]) == []
