"""HTTP preconditions: entity-tags made of versions, and the check of If-Match and If-None-Match. Pure: no I/O.

A tag is opaque, equal in every process, and unique to one object. The part after a dot distinguishes representations
(JSON, HTML): a cache must not confuse them, but a client that has seen any of them has seen the version.
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
"""Methods that read the object: If-None-Match is answered with 304."""
UNCONDITIONAL_METHODS: Final = ("CONNECT", "OPTIONS", "TRACE")
"""Methods that neither read nor change the object: their preconditions must be ignored (RFC 9110, 13.2.1)."""
_ELEMENT: Final = re.compile(r'[ \t]*(?:(W/)?"([\x21\x23-\x7e\x80-\xff]*)"[ \t]*)?(?:,|\Z)')
_IF_MATCH_ATTRIBUTE: Final = "_dlock_if_match"
"""Attribute of an instance whose version matched If-Match; it holds the header."""


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
    """Return the strong tag, in its quotes, of a row with its table, its key (a tuple if composite) and its version.

    `variant` distinguishes the representations of one URL, by Accept or by user. The tag is 128 bits of a hash, so that
    two objects never share one; it hides nothing. A row that is deleted and created again with the same key has
    another version, and so another tag.
    """
    parts = [str(part) for part in (key if isinstance(key, tuple) else (key,))]
    digest = sha256(dumps([kind, parts, str(version)]).encode()).digest()[:16]
    opaque = urlsafe_b64encode(digest).rstrip(b"=").decode()
    return f'"{opaque}.{quote(variant, safe="")}"' if variant else f'"{opaque}"'


def evaluate(request: HttpRequest, instance: Any, tag: str, *, name: str, required: bool, accept_weak: bool) -> bool:
    """Check a request for an object that exists and has this tag; return True to answer 304, False to proceed.

    The checks follow the order of RFC 9110, 13.2.2. A later StaleObject of `instance` is answered with 412 as well.

    Args:
        request: the request; only its method and headers are read.
        instance: the object, if it is the one that will be written; else None.
        tag: the object's entity-tag.
        name: the object's name for error messages.
        required: whether methods that change the object need If-Match (RFC 6585, 3).
        accept_weak: whether a weak tag satisfies If-Match. Proxies that compress turn our strong tags into weak ones.

    Raises:
        PreconditionFailed: the condition does not hold (412).
        PreconditionRequired: If-Match is missing (428).
        PreconditionMalformed: a condition cannot be read (400). Ignoring it could overwrite a change.
    """
    if request.method in UNCONDITIONAL_METHODS:
        return False
    own = Tag(tag.strip('"'))
    given = _header(request, "If-Match")
    if given is not None:
        _require_match(given, own, name=name, accept_weak=accept_weak)
        if given.strip() != "*" and instance is not None:
            setattr(instance, _IF_MATCH_ATTRIBUTE, given)
    elif required and request.method not in READ_METHODS:
        raise PreconditionRequired(name)
    return _is_known(request, own, name=name)


def as_precondition(error: DLockError) -> DLockError:
    """Return a PreconditionFailed for the StaleObject of an instance that met If-Match, and any other error unchanged.

    The row was changed between the check and the UPDATE, which checks again. The client gets the answer that it would
    have got a moment later.
    """
    given = getattr(error.instance, _IF_MATCH_ATTRIBUTE, None) if isinstance(error, StaleObject) else None
    return error if given is None else PreconditionFailed(error.name, header="If-Match", given=given)


def parse(given: str, *, header: str, name: str) -> Sequence[Tag] | None:
    """Return the tags of a header, or None for "*"; raises PreconditionMalformed.

    Empty list elements are allowed (RFC 9110, 5.6.1.2).
    """
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
        if reads:  # This does no harm: the client gets the whole object.
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
    """Return a header with its lines joined, as Django and WSGI servers do; Starlette returns only the first line."""
    headers = request.headers
    if not hasattr(headers, "getlist"):
        return headers.get(name)  # type: ignore[no-any-return]
    lines = headers.getlist(name)
    return ", ".join(lines) if lines else None
