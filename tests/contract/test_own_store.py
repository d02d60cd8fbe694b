"""The store of docs/howto/own-store.md, found by its entry point like a third-party package, keeps the contract."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlock_core import connect
from dlock_core.backend import Backend
from dlock_core.stores import schemes
from dlock_core.testing.contract import *  # noqa: F403

PAGE = Path(__file__).parents[2] / "docs/howto/own-store.md"


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
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
    yield
    sys.path.remove(str(site))
    sys.modules.pop("filestore", None)


@pytest.fixture
def backend(package: None, tmp_path: Path) -> Backend:
    assert "file" in schemes()
    return connect(f"file://{tmp_path}/locks")
