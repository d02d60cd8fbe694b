"""A store with scripted answers, for tests of the engine that take no time."""

from collections.abc import Callable, Sequence
from typing import Any

from dlock_core.backend import AcquireRequest, Busy, Capabilities, Granted, Released, Renewal
from dlock_core.errors import BackendUnavailable
from dlock_core.testing import ManualRuntime

BROKEN = BackendUnavailable("a", reason="the idle connection was dead", broken=True)
DOWN = BackendUnavailable("a", reason="no answer")
REFUSED = BackendUnavailable("a", reason="wrong password", refused=True)

Answer = Granted | Busy | BackendUnavailable | BaseException | float | Released | list[Any] | None


class Ahead(ManualRuntime):
    """Collects background work instead of running it."""

    def __init__(self) -> None:
        super().__init__()
        self.left: list[Any] = []

    def run_in_background(self, coroutine: Any) -> None:
        self.left.append(coroutine)


class Scripted:
    """Gives the answers of `script` in turn, the last one forever; each answer takes `takes` seconds."""

    capabilities = Capabilities(fair=True, shared=True, lists_waiters=True, ttl_min=0.001)

    def __init__(self, runtime: ManualRuntime, *script: Answer, takes: float = 0.0) -> None:
        self.runtime, self.script, self.takes = runtime, list(script), takes
        self.calls: list[tuple[str, float]] = []
        self.unsure: list[bool] = []
        self.tickets: list[Any] = []
        self.abandoned: list[str] = []
        self.on_abandon: Callable[[], None] = lambda: None
        self.news: Granted | Busy | None = None
        """What the store says at the end of a wait."""

    def answer(self, what: str) -> Any:
        self.calls.append((what, self.runtime.now()))
        self.runtime.advance(self.takes)
        answer = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(answer, BaseException):
            raise answer.with_traceback(None)  # several tests raise the same error, which must not collect their frames
        return answer

    def asked(self, what: str) -> list[float]:
        return [moment for kind, moment in self.calls if kind == what]

    async def try_acquire(
        self, runtime: Any, request: AcquireRequest, ticket: Any = None, *, unsure: bool = False
    ) -> Any:
        self.unsure.append(unsure)
        self.tickets.append(ticket)
        return self.answer("try_acquire")

    async def wait(self, runtime: Any, request: AcquireRequest, busy: Busy, timeout: float) -> Any:
        self.calls.append(("wait", runtime.now()))
        await runtime.sleep(timeout)
        return self.news

    async def abandon(self, runtime: Any, request: AcquireRequest, ticket: Any = None) -> None:
        self.abandoned.append(request.holder)
        self.tickets.append(ticket)
        self.on_abandon()

    async def release(self, runtime: Any, request: AcquireRequest, granted: Granted) -> Any:
        return self.answer("release")

    async def renew(self, runtime: Any, renewals: Sequence[Renewal]) -> Any:
        return self.answer("renew")


def driver_error(module: str, name: str, *args: object, **attributes: object) -> Exception:
    """Return an error like that of a driver that is not installed here."""
    kind = type(name, (Exception,), {"__module__": module, **attributes})
    return kind(*args)
