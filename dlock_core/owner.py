"""What a holder says of itself: metadata for the error message and the inspector, never a proof of anything."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["describe", "name_application", "request_line", "serving", "text"]

request_line: ContextVar[str] = ContextVar("dlock_request_line", default="")
"""The request that is being served, such as "POST /orders/42/ship"; middlewares set it. No query string."""

_application = ""

_LONGEST: Final = 200


def name_application(label: str) -> None:
    """Label this process in listings; without it, it goes by the program's file name."""
    global _application  # noqa: PLW0603 - a process has one name
    _application = label


@contextmanager
def serving(method: str | None, path: str) -> Iterator[str]:
    """Name the request that runs in the block, on one short line; a query string may hold what is nobody's business."""
    token = request_line.set(printable(f"{method} {path}"))
    try:
        yield request_line.get()
    finally:
        request_line.reset(token)


def text() -> str:
    """Describe this thread and request as a short JSON object: app, host, pid, thread, request."""
    return _text(os.getpid(), threading.current_thread().name, request_line.get(), _application)


@lru_cache(maxsize=1024)
def _text(pid: int, thread: str, request: str, app: str) -> str:
    app = app or Path(sys.argv[0] if sys.argv else "").name or "python"
    data: dict[str, str | int] = {
        "app": app,
        "host": socket.gethostname(),
        "pid": pid,
        "thread": thread,
        "request": request,
    }
    return json.dumps({key: _clean(value) for key, value in data.items() if value}, separators=(",", ":"))


def _clean(value: str | int) -> str | int:
    return value if isinstance(value, int) else printable(value)


def printable(words: str) -> str:
    """Make one short line of words that may hold anything."""
    return "".join(char if char.isprintable() else "?" for char in words[:_LONGEST])


def describe(owner: str) -> str:
    """Turn the owner text of a lease, also of a foreign one, into words for people."""
    try:
        data = json.loads(owner)
    except ValueError:
        data = None
    if not isinstance(data, dict):
        return printable(owner)
    where = (
        f"{data.get('app', '?')}@{data.get('host', '?')} pid {data.get('pid', '?')} {data.get('thread', '')}".strip()
    )
    return printable(f"{data['request']} ({where})" if data.get("request") else where)
