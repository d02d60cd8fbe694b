"""The store of docs/howto/own-store.md, found by its entry point like a third-party package, keeps the contract."""

import itertools
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from dlock_core import connect
from dlock_core.backend import AcquireRequest, Backend, Renewal
from dlock_core.leases.acquisition import new_request
from dlock_core.options import LockOptions
from dlock_core.runtime import BLOCKING, run
from dlock_core.stores import schemes
from dlock_core.testing.contract import *  # noqa: F403
from tests.processes import Link, worker

PAGE = Path(__file__).parents[2] / "docs/howto/own-store.md"


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Install the package: write its module, and the metadata that an installer would write."""
    site, text = tmp_path_factory.mktemp("site-packages"), PAGE.read_text()
    [module] = re.findall(r"```python\n(# filestore\.py\n.*?)```", text, re.S)
    [group, point] = re.search(r'\[project\.entry-points\."([\w.]+)"\]\n(\w+) = "', text).groups()
    [target] = re.findall(rf'^{point} = "(.*)"$', text, re.M)
    (site / "filestore.py").write_text(module)
    (site / "filestore-1.dist-info").mkdir()
    (site / "filestore-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: filestore\nVersion: 1\n")
    (site / "filestore-1.dist-info/entry_points.txt").write_text(f"[{group}]\n{point} = {target}\n")
    sys.path.insert(0, str(site))
    yield site
    sys.path.remove(str(site))
    sys.modules.pop("filestore", None)


@pytest.fixture
def backend(package: Path, tmp_path: Path) -> Backend:
    assert "file" in schemes()
    return connect(f"file://{tmp_path}/locks")


def call_and_die(_link: Link, site: str, url: str, method: str, argument: Any, last: int) -> None:
    """Call the store, and be killed before the line of its module with the number `last`, if there are so many."""
    sys.path.insert(0, site)
    store, lines = connect(url), itertools.count()

    def trace(frame: FrameType, event: str, _arg: object) -> Any:
        if not frame.f_code.co_filename.endswith("filestore.py"):
            return None
        if event == "line" and next(lines) == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    run(getattr(store, method)(BLOCKING, argument))
    sys.settrace(None)


@pytest.mark.parametrize("who", ["waiter", "holder"])
def test_process_that_is_killed_during_a_request_costs_no_holder_its_lease(
    package: Path, tmp_path: Path, who: str
) -> None:
    url = f"file://{tmp_path}/locks"
    store: Backend = connect(url)
    held: AcquireRequest = new_request("a", LockOptions(60.0))
    granted: Any = run(store.try_acquire(BLOCKING, held))
    call = ("renew", [Renewal(held, granted)]) if who == "holder" else ("try_acquire", new_request("a", LockOptions()))
    for last in itertools.count():
        with worker(call_and_die, str(package), url, *call, last) as process:
            try:
                process.result()
            except EOFError:
                was_killed = True
            else:
                was_killed = False
        (state,) = run(store.inspect(BLOCKING, "a"))
        assert [(holder.holder, holder.token) for holder in state.holders] == [(held.holder, granted.token)]
        if not was_killed:
            break
    assert last > 5
