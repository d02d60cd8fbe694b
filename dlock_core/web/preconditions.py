"""HTTP preconditions: entity-tags made of versions, and what If-Match and If-None-Match say of them. Pure: no I/O.

A tag is opaque, the same in every process, and no other object's. What stands in it after a dot tells representations
apart (JSON, HTML): a cache must not take one for another, but whoever has seen any of them has seen the version.
"""

from __future__ import annotations

import re
from base64 import urlsafe_b64encode
from hashlib import sha256
from json import dumps
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol
from urllib.parse import quote

from dlock_core.errors import DLockError, PreconditionFailed, PreconditionMalformed, PreconditionRequired, StaleObject
from dlock_core.observability import hooks

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["READ_METHODS", "UNCONDITIONAL_METHODS", "Tag", "as_precondition", "entity_tag", "evaluate", "parse"]

READ_METHODS: Final = ("GET", "HEAD")
UNCONDITIONAL_METHODS: Final = ("CONNECT", "OPTIONS", "TRACE")
"""Methods that neither read nor change the object: their preconditions are to be ignored (RFC 9110, 13.2.1)."""
_ELEMENT: Final = re.compile(r'[ \t]*(?:(W/)?"([\x21\x23-\x7e\x80-\xff]*)"[ \t]*)?(?:,|\Z)')
_SEEN: Final = "_dlock_if_match"
"""Stands on an instance whose version is the one in If-Match."""


class HttpRequest(Protocol):
    """A request of Django, Django REST framework, Starlette or Flask."""

    @property
    def method(self) -> Any:
        """The method, in upper case."""

    @property
    def headers(self) -> Any:
        """The headers, by name in any case."""


class Tag(NamedTuple):
    """An entity-tag of a header, without its quotes."""

    opaque: str
    is_weak: bool = False


def entity_tag(kind: str, key: object, version: object, variant: str = "") -> str:
    """Make the strong tag, in its quotes, of a row: its table, its key (a tuple if composite), its version.

    `variant` tells apart what one URL answers with by Accept, or by who asks. 128 bits of a hash, so that two objects
    never share a tag; it keeps no secret. A row that is deleted and made again with its key has another version.
    """
    parts = [str(part) for part in (key if isinstance(key, tuple) else (key,))]
    digest = sha256(dumps([kind, parts, str(version)]).encode()).digest()[:16]
    opaque = urlsafe_b64encode(digest).rstrip(b"=").decode()
    return f'"{opaque}.{quote(variant, safe="")}"' if variant else f'"{opaque}"'


def evaluate(request: HttpRequest, instance: Any, tag: str, *, name: str, required: bool, accept_weak: bool) -> bool:
    """Judge a request for an object that exists and has this tag: True to answer 304, False to go on.

    In the order of RFC 9110, 13.2.2. Raises PreconditionFailed (412), PreconditionRequired (428: no If-Match where
    `required`, for methods that change; RFC 6585, 3), PreconditionMalformed (400: to overlook a condition that cannot
    be read would be to overwrite). `accept_weak` lets If-Match be met by a weak tag, which is all that is left of ours
    behind what compresses. A later StaleObject of `instance` says 412, too.
    """
    if request.method in UNCONDITIONAL_METHODS:
        return False
    own = Tag(tag.strip('"'))
    given = _header(request, "If-Match")
    if given is not None:
        _require_match(given, own, name=name, accept_weak=accept_weak)
        if given.strip() != "*" and instance is not None:
            setattr(instance, _SEEN, given)
    elif required and request.method not in READ_METHODS:
        raise PreconditionRequired(name)
    return _is_known(request, own, name=name)


def as_precondition(error: DLockError) -> DLockError:
    """Turn the StaleObject of an instance whose version came from If-Match into the PreconditionFailed that it is.

    Somebody was faster between the check and the UPDATE, which checks again: the same answer as a moment later.
    """
    given = getattr(error.instance, _SEEN, None) if isinstance(error, StaleObject) else None
    return error if given is None else PreconditionFailed(error.name, header="If-Match", given=given)


def parse(given: str, *, header: str, name: str) -> Sequence[Tag] | None:
    """Read a list of tags, empty elements allowed (RFC 9110, 5.6.1.2); None for "*"; raises PreconditionMalformed."""
    if given.strip() == "*":
        return None
    tags, at = [], 0
    while at < len(given):
        found = _ELEMENT.match(given, at)
        if found is None:
            raise PreconditionMalformed(name, header=header, given=given)
        if found[2] is not None:
            tags.append(Tag(found[2], found[1] is not None))
        at = found.end()
    return tags


def _require_match(given: str, own: Tag, *, name: str, accept_weak: bool) -> None:
    tags = parse(given, header="If-Match", name=name)
    if tags is None:
        return
    if not any(_version(tag) == _version(own) and (accept_weak or not tag.is_weak) for tag in tags):
        raise hooks.emit_conflict(PreconditionFailed(name, header="If-Match", given=given))


def _is_known(request: HttpRequest, own: Tag, *, name: str) -> bool:
    given, reads = _header(request, "If-None-Match"), request.method in READ_METHODS
    if given is None:
        return False
    try:
        tags = parse(given, header="If-None-Match", name=name)
    except PreconditionMalformed:
        if reads:  # no harm: it gets the whole object
            return False
        raise
    if tags is not None and not any(tag.opaque == own.opaque for tag in tags):
        return False
    if reads:
        return True
    raise PreconditionFailed(name, header="If-None-Match", given=given)


def _version(tag: Tag) -> str:
    return tag.opaque.partition(".")[0]


def _header(request: HttpRequest, name: str) -> str | None:
    """Join the lines of a header; Django and WSGI servers have done so, Starlette gives the first one only."""
    headers = request.headers
    if not hasattr(headers, "getlist"):
        return headers.get(name)  # type: ignore[no-any-return]
    lines = headers.getlist(name)
    return ", ".join(lines) if lines else None
