"""The race as a page: it runs in a separate process, on a separate database, and reports what happens line by line."""

import os
import subprocess
import sys
import threading
from tempfile import TemporaryFile
from typing import IO, Any

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_GET, require_POST

from shop.strategies import STRATEGIES

ORDERS, WORKERS = 80, 4
COMMAND = (sys.executable, "manage.py", "race", "--format=lines", f"--orders={ORDERS}", f"--workers={WORKERS}")


def _new_file() -> IO[bytes]:
    return TemporaryFile()


class Race:
    """The race that this server runs, or ran last."""

    def __init__(self) -> None:
        self._starting = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._lines, self._complaints = _new_file(), _new_file()

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it, unless one is running: two at once would slow each other down."""
        with self._starting:
            if self.is_running:
                return
            self._lines, self._complaints = _new_file(), _new_file()
            environment = {name: value for name, value in os.environ.items() if name != "DATABASE_URL"}
            self._process = subprocess.Popen(
                COMMAND, cwd=settings.BASE_DIR, env=environment, stdout=self._lines, stderr=self._complaints
            )

    def text(self, start: int) -> str:
        """Return the complete lines that it has written, from a position on."""
        written = os.pread(self._lines.fileno(), 1_000_000, start)
        return written[: written.rfind(b"\n") + 1].decode()

    def complaint(self) -> str:
        """Return why it failed, or an empty text."""
        if self._process is None or not self._process.poll():
            return ""
        return os.pread(self._complaints.fileno(), 10_000, 0).decode(errors="replace")


current = Race()


@require_GET
def page(request: HttpRequest) -> HttpResponse:
    """Show the race that runs, with a button that starts one."""
    strategies = {name: (strategy.__doc__ or "").partition("\n")[0] for name, strategy in STRATEGIES.items()}
    context: dict[str, Any] = {"strategies": strategies, "orders": range(ORDERS), "is_running": current.is_running}
    return render(request, "shop/race.html", context)


@require_POST
def start(request: HttpRequest) -> HttpResponse:
    """Start a race."""
    current.start()
    return redirect("race")


@require_GET
def lines(request: HttpRequest) -> HttpResponse:
    """Return what has happened since the position `from`; headers say whether more will come, and why it failed."""
    position = request.GET.get("from", "0")
    is_running = current.is_running  # asked before the text is read: the last lines must not be missed
    text = current.text(int(position) if position.isdecimal() and len(position) < 16 else 0)
    response = HttpResponse(text, content_type="application/jsonl")
    response.headers["Race"] = "running" if is_running else "failed" if current.complaint() else "over"
    return response
