"""The HTTP answer to an error: problem+json (RFC 9457), or a small page for a person.

Only the name of the lock or object leaves the server: never a token, and nothing that a holder or the store said.
"""

from __future__ import annotations

import html
import json
import logging
import math
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from dlock_core.errors import (
    AcquireTimeout,
    BackendUnavailable,
    DLockError,
    LeaseLost,
    NoSuchKey,
    PreconditionFailed,
    PreconditionMalformed,
    PreconditionRequired,
    RowLocked,
    StaleObject,
    StaleToken,
)
from dlock_core.owner import request_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["Answer", "answer", "prefers_html", "respond"]

MAX_RETRY_AFTER_S: Final = 86400.0
"""Upper bound of the Retry-After header: one day."""

logger = logging.getLogger("dlock")


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete HTTP answer, ready for the framework to send."""

    status: HTTPStatus
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class _Problem:
    kind: str
    status: HTTPStatus
    title: str
    detail: str
    subject: str = "lock"


_TAKEN: Final = "Someone else is working on {name}. Try again in a moment."
_BUSY: Final = "The database is busy with other work, so {name} cannot be changed now. Try again in a moment."
_CHANGED: Final = "Someone else has changed {name} in the meantime. Look at it again before you repeat your change."
_OVERTAKEN: Final = (
    "The work on {name} took too long, and someone else has begun. Look at it again before you repeat your change."
)
_DOWN: Final = "The lock service cannot be reached. Try again in a moment."
_DIFFERS: Final = "{name} is not the version that this request expects: it was changed first. Look at it again."
_NEEDED: Final = "This request must say which version of {name} it changes: GET it, and send its ETag as If-Match."
_MISSING: Final = "There is no {name} with this key."
_UNREADABLE: Final = 'The precondition for {name} cannot be read. It must be * or a list of quoted tags: "abc", "def".'

_PROBLEMS: Final[dict[type[DLockError], _Problem]] = {
    AcquireTimeout: _Problem("acquire-timeout", HTTPStatus.LOCKED, "In use by someone else", _TAKEN),
    RowLocked: _Problem("row-locked", HTTPStatus.LOCKED, "In use by someone else", _TAKEN, "object"),
    StaleObject: _Problem("stale-object", HTTPStatus.CONFLICT, "Changed by someone else", _CHANGED, "object"),
    StaleToken: _Problem("stale-token", HTTPStatus.CONFLICT, "Overtaken by someone else", _OVERTAKEN),
    LeaseLost: _Problem("lease-lost", HTTPStatus.CONFLICT, "Overtaken by someone else", _OVERTAKEN),
    PreconditionFailed: _Problem(
        "precondition-failed", HTTPStatus.PRECONDITION_FAILED, "Changed by someone else", _DIFFERS, "object"
    ),
    PreconditionRequired: _Problem(
        "precondition-required", HTTPStatus.PRECONDITION_REQUIRED, "If-Match is missing", _NEEDED, "object"
    ),
    PreconditionMalformed: _Problem(
        "precondition-malformed", HTTPStatus.BAD_REQUEST, "Precondition cannot be read", _UNREADABLE, "object"
    ),
    NoSuchKey: _Problem("no-such-key", HTTPStatus.NOT_FOUND, "Not found", _MISSING, "kind"),
    BackendUnavailable: _Problem("unavailable", HTTPStatus.SERVICE_UNAVAILABLE, "Lock service unavailable", _DOWN),
}

_BUSY_DATABASE: Final = _Problem("row-locked", HTTPStatus.LOCKED, "Database is busy", _BUSY, "object")

_PAGE: Final = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
</head>
<body>
<main>
<h1>{title}</h1>
<p>{detail}</p>
</main>
</body>
</html>
"""


def respond(error: DLockError, accept: str = "") -> Answer | None:
    """Return what `answer` does, and log it with the name of the request: a 503 as an error, a conflict as info."""
    found = answer(error, accept)
    if found is not None:
        logger.log(logging.ERROR if found.status >= 500 else logging.INFO, "%s: %s", request_line.get(), error)
    return found


def answer(error: DLockError, accept: str = "") -> Answer | None:
    """Return the HTTP answer to an error, in the form that `accept`, an Accept header, prefers.

    Returns None for errors that are mistakes of the program, such as NotSupported: let them propagate.
    """
    if isinstance(error, StaleObject):
        from dlock_core.web.preconditions import as_precondition

        error = as_precondition(error)
    problem = next((_PROBLEMS[kind] for kind in type(error).__mro__ if kind in _PROBLEMS), None)
    if isinstance(error, RowLocked) and error.is_database:
        problem = _BUSY_DATABASE
    if problem is None:
        return None
    as_html = prefers_html(accept)
    body = (_page if as_html else _json)(problem, error.name)
    headers = {
        "Content-Type": "text/html; charset=utf-8" if as_html else "application/problem+json",
        "Content-Length": str(len(body)),
        "Vary": "Accept",
        **_retry_after(error),
    }
    return Answer(problem.status, headers, body)


def prefers_html(accept: str) -> bool:
    """Return whether an Accept header prefers HTML to JSON (RFC 9110, 12.5.1).

    HTML needs the higher q-value or, at equal values, to be named more precisely (`text/html, */*`). A client that
    accepts both equally, neither, or sends no header gets JSON.
    """
    ranges = list(_ranges(accept))
    return _quality(ranges, "text/html") > max(_quality(ranges, f"application/{kind}json") for kind in ("problem+", ""))


def _ranges(accept: str) -> Iterator[tuple[str, float]]:
    for item in accept.lower().split(","):
        media, *parameters = [part.strip() for part in item.split(";")]
        yield media, next((_q(value[2:]) for value in parameters if value.startswith("q=")), 1.0)


def _q(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if 0 <= value <= 1 else 0.0


def _quality(ranges: Iterable[tuple[str, float]], media: str) -> tuple[float, int]:
    """Return the q-value and precision of the most precise range that covers a media type."""
    covering = ("*/*", media.split("/", maxsplit=1)[0] + "/*", media)
    precision, q = max(((covering.index(given), q) for given, q in ranges if given in covering), default=(-1, 0.0))
    return q, precision if q else -1


def _retry_after(error: DLockError) -> dict[str, str]:
    seconds = getattr(error, "retry_after", None)
    if seconds is None:
        return {}
    return {"Retry-After": str(math.ceil(min(MAX_RETRY_AFTER_S, max(1.0, seconds))))}


def _json(problem: _Problem, name: str) -> bytes:
    data = {
        "type": f"urn:dlock:{problem.kind}",
        "title": problem.title,
        "status": int(problem.status),
        "detail": problem.detail.format(name=name),
        problem.subject: name,
    }
    return json.dumps(data).encode()


def _page(problem: _Problem, name: str) -> bytes:
    text = _PAGE.format(title=html.escape(problem.title), detail=html.escape(problem.detail.format(name=name)))
    return text.encode(errors="replace")
