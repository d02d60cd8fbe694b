"""A headless Chromium, driven over a pipe by its DevTools protocol: no driver, no port."""

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from tests.servers import ServerMissing

WITHIN = 60.0  # seconds to wait for anything; what does happen never takes that long
FLAGS = (
    *(
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        "--no-first-run",
    ),
    *("--disable-extensions", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


class Chromium:
    """One browser with one page."""

    def __init__(self, directory: Path) -> None:
        self.program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        if self.program is None:
            raise ServerMissing("chromium is missing: apt-get install chromium")
        self.directory = directory

    def __enter__(self) -> Self:
        (theirs_in, self._in), (self._out, theirs_out) = _pipe(), _pipe()
        command = [self.program, *FLAGS, f"--user-data-dir={self.directory}", "--remote-debugging-pipe", "about:blank"]
        script = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'  # the numbers that Chromium expects
        with (self.directory / "log").open("wb") as log:
            self._process = subprocess.Popen(
                ["bash", "-c", script, "bash", *command], pass_fds=(theirs_in, theirs_out), stdout=log, stderr=log
            )
        os.close(theirs_in)
        os.close(theirs_out)
        self._number, self._session, self._received = 0, "", b""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            os.write(self._in, b'{"id":0,"method":"Browser.close"}\0')
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def call(self, method: str, **params: Any) -> Any:
        answer = self._ask(method, **params)
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def _ask(self, method: str, **params: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._in, json.dumps(message).encode() + b"\0")
        return self._wait(self._number)

    def _wait(self, number: int) -> Any:
        until = time.monotonic() + WITHIN
        while time.monotonic() < until:
            message, separator, rest = self._received.partition(b"\0")
            if separator:
                self._received = rest
                heard = json.loads(message)
                if heard.get("id") == number:
                    return heard
            elif select.select([self._out], [], [], 1)[0]:
                self._received += os.read(self._out, 1 << 20)
        raise TimeoutError(f"Chromium did not answer within {WITHIN:g} s")

    def go(self, address: str) -> None:
        self._leave(lambda: self.call("Page.navigate", url=address))

    def click(self, selector: str) -> None:
        """Click something that leads to another page."""
        self._leave(lambda: self.js(f"document.querySelector({json.dumps(selector)}).click()"))

    def _leave(self, act: Callable[[], object]) -> None:
        """Do something that replaces the page, and wait until the next one is loaded.

        The old page is marked, because the browser's events do not say which page has loaded: on a slow machine the
        page before may still be loading.
        """
        self.js("window.isLeft = true")
        act()
        give_up_at = time.monotonic() + WITHIN
        while not self._has_arrived():
            assert time.monotonic() < give_up_at, f"no other page was loaded within {WITHIN:g} s\n{self.text()}"
            time.sleep(0.01)

    def _has_arrived(self) -> bool:
        arrived = "!window.isLeft && document.readyState === 'complete'"
        answer = self._ask("Runtime.evaluate", expression=arrived, returnByValue=True)
        # An error means that the page was replaced during the evaluation.
        return bool(answer.get("result", {}).get("result", {}).get("value", False))

    def js(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def text(self) -> str:
        return self.js("document.body.innerText")

    def until(self, expression: str) -> None:
        """Wait until a JavaScript expression is true."""
        end = time.monotonic() + WITHIN
        while not self.js(f"Boolean({expression})"):
            assert time.monotonic() < end, f"never true: {expression}\n{self.text()}"
            time.sleep(0.05)

    def log_in(self, address: str, client: Any) -> None:
        """Log in as the user of Django's test client."""
        self.call("Network.setCookie", name="sessionid", value=client.cookies["sessionid"].value, url=address)

    def screenshot(self, file: Path, width: int = 1280, *, dark: bool = False) -> None:
        self.size(width)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)
        picture = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(picture["data"]))

    def size(self, width: int) -> None:
        phone = width < 600
        metrics = {"width": width, "height": 844 if phone else 800, "deviceScaleFactor": 1, "mobile": phone}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)


def _pipe() -> tuple[int, int]:
    """Return a pipe with numbers above those that Chromium expects."""
    ends = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return high[0], high[1]
