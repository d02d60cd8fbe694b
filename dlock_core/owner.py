"""A holder's description of itself: metadata for the error message and the inspector, never a proof."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import sys
import threading
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from dlock_core.flow import flow_variable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextvars import ContextVar

__all__ = ["describe", "name_application", "request_line", "serving", "text"]

request_line: ContextVar[str] = flow_variable("dlock_request_line", "")
"""The request that is being served, such as "POST /orders/42/ship"; middlewares set it. No query string."""

_application = ""

_MAX_TEXT_LENGTH: Final = 200
_MAIN_THREAD: Final = "MainThread"

_numbers: Final = itertools.count(1)
_known: Final[WeakKeyDictionary[object, int]] = WeakKeyDictionary()


def name_application(label: str) -> None:
    """Label this process in listings; the default label is the program's file name.

    Raises TypeError for a label that is no text.
    """
    if not isinstance(label, str):
        raise TypeError(f"the label of a process is text, not {type(label).__name__}: {label!r:.80}")
    global _application  # noqa: PLW0603 - a process has one name
    _application = label


@contextmanager
def serving(method: str | None, path: str) -> Iterator[str]:
    """Name the request that runs in the block, on one short line; without the query string, which may be secret."""
    token = request_line.set(printable(f"{method} {path}"))
    try:
        yield request_line.get()
    finally:
        request_line.reset(token)


def text(own: tuple[str, ...] = (), inside: tuple[str, ...] = ()) -> str:
    """Describe this thread or task and its request as a short JSON object.

    It has app, host, pid, thread or task, its number `id`, and request; and the database sessions that belong to it:
    its `own` sessions, and those `in` whose open transaction it requests a lock (see `database_session`). The main
    thread is the default, so it is left out.
    """
    pid, request = os.getpid(), request_line.get()
    task = asyncio.current_task() if in_task() else None
    if task is None:
        thread = threading.current_thread()
        number, name = _numbered(thread), thread.name
        name = "" if number == 0 and name == _MAIN_THREAD else name  # `parsed` restores it: 22 bytes less per lease.
        return _text(pid, "thread", name, number, request, _application, own, inside)
    return _text(pid, "task", task.get_name(), _numbered(task), request, _application, own, inside)


def in_task() -> bool:
    """Return whether this code runs in an event loop, which many tasks share."""
    return asyncio._get_running_loop() is not None  # noqa: SLF001 - documented for event loops; it raises nothing


def _numbered(worker: object) -> int:
    """Return a number that no other thread or task has in this process.

    The main thread, of which there is one, has none: the text is stored with every lease.
    """
    if worker is threading.main_thread():
        return 0
    number = _known.get(worker)
    if number is None:
        _known[worker] = number = next(_numbers)
    return number


@lru_cache(maxsize=1024)
def _text(  # noqa: PLR0917 - the hot path: keywords cost
    pid: int,
    kind: str,
    name: str,
    number: int,
    request: str,
    app: str,
    own: tuple[str, ...],
    inside: tuple[str, ...],
) -> str:
    app = app or Path(sys.argv[0] if sys.argv else "").name or "python"
    words = {"app": app, "host": socket.gethostname(), "pid": pid, kind: name, "id": number, "request": request}
    data = {key: _clean(value) for key, value in words.items() if value}
    data |= {key: some for key, some in (("own", own), ("in", inside)) if some}
    return json.dumps(data, separators=(",", ":"))


def _clean(value: Any) -> Any:
    return value if isinstance(value, int) else printable(value)


def printable(words: str) -> str:
    """Return arbitrary text as one short printable line."""
    return "".join(char if char.isprintable() else "?" for char in words[:_MAX_TEXT_LENGTH])


def parsed(owner: str) -> dict[str, Any] | None:
    """Parse an owner's text; return None if another library wrote it."""
    try:
        data = json.loads(owner)
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict):
        return None
    if "pid" in data and "task" not in data:
        data.setdefault("thread", _MAIN_THREAD)
    return data


def describe(owner: str) -> str:
    """Return the owner text of a lease, even of another library's, as words for people."""
    data = parsed(owner)
    if data is None:
        return printable(owner)
    worker = data.get("thread") or data.get("task") or ""
    where = f"{data.get('app', '?')}@{data.get('host', '?')} pid {data.get('pid', '?')} {worker}".strip()
    return printable(f"{data['request']} ({where})" if data.get("request") else where)
