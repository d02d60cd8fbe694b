"""Lock names: parts joined with ":", each percent-encoded (RFC 3986), so that ("a:b",) is not ("a", "b").

A name is ASCII text of 1 to 512 bytes, whatever its parts were, and is safe in keys, paths and logs. This module alone
turns values into text. It accepts only types whose text is the same in every process and refuses all others: a text
that differs between two processes would silently make two locks of one name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time
from decimal import Decimal
from enum import Enum
from functools import lru_cache
from numbers import Integral, Number, Rational
from types import NoneType
from typing import Any, Final
from urllib.parse import quote, unquote, unquote_to_bytes
from uuid import UUID

from dlock_core.errors import NoSuchKey

__all__ = ["MAX_NAME_BYTES", "REFUSALS", "AmbiguousKey", "Kind", "canonical", "join", "plain_number", "with_keys"]

MAX_NAME_BYTES: Final = 512
_PLAIN: Final = re.compile(r"[A-Za-z0-9_.~:-]+")
_UNRESERVED: Final = re.compile(r"[A-Za-z0-9_.~-]+")
"""The characters that percent-encoding leaves unchanged."""
_JOINED: Final = re.compile(r"[A-Za-z0-9_.~-]+(?::[A-Za-z0-9_.~-]+)*")
_NUMBER: Final = re.compile(r"\s*[-+0-9.eE]+\s*", re.ASCII)
_ADDRESS: Final = re.compile(r"\bat 0x[0-9A-Fa-f]+")
_PRINTS_FIELDS: Final = frozenset({"pydantic.main", "pydantic.utils", "pydantic.v1.utils"})
"""The modules that define the text of Pydantic's models, of version 2 and 1: all fields of the model."""
_EXACT_TYPES: Final = frozenset({str, int, UUID})
"""Types whose `str` is their text. Subclasses are excluded, because they may define another `__str__`."""


def join(*parts: object) -> str:
    """Join parts to the name of a lock; all but the first may come from untrusted input: a URL, a form, a key.

    A part is text, bytes, an integer, UUID, Decimal, date, time or Enum, or has a type that defines `__str__`. Equal
    values have equal texts: 42 and "42", Decimal("1.0") and Decimal("1.00"), one moment in two time zones, a member of
    a StrEnum or IntEnum and its value. Texts are compared exactly, as most databases compare keys.

    Raises TypeError for a value without such a text (None, bool, float, containers, functions, iterators, classes,
    objects that only have a `__repr__`), or whose text is its contents (Pydantic models, mappings, arrays, forms,
    exceptions). Raises ValueError if a part is empty, the first part contains ":", or the name is longer than 512
    bytes.
    """
    if _EXACT_TYPES.issuperset(map(type, parts)):  # Most names: nothing has to be encoded.
        name = ":".join(map(str, parts))
        if _JOINED.fullmatch(name) and name.count(":") == len(parts) - 1:
            return _checked(name) if len(name) > MAX_NAME_BYTES else name
    if not parts:
        raise ValueError(
            "neither a name nor locks were given: pass at least one part, as in lock('order', 42), or one lock"
        )
    encoded = [_encoded(part) for part in parts]
    if "%3A" in encoded[0]:
        _refuse_joined(unquote(encoded[0]))
    return _checked(":".join(encoded))


def are_plain(parts: Sequence[object]) -> bool:
    """Return whether the parts are certainly values, so that no integration has to look for a model among them.

    This is true for texts, integers and UUIDs; but a text with a dot may be a model's label.
    """
    return bool(parts) and _EXACT_TYPES.issuperset(map(type, parts)) and "." not in str(parts[0])


def label_text(part: object) -> str | None:
    """Return the text of a first part that may be a model's label, and None for one that is no text.

    A member of a StrEnum, SQLAlchemy's `quoted_name` and bytes have the name of the text that they contain.
    """
    if type(part) is str:
        return part
    return unquote(_encoded(part)) if isinstance(part, str | bytes) and part else None


def plain_number(value: Any) -> Any:
    """Return a value that becomes a number; raises ValueError for a text that only Python reads so, as "1_0" or "٤٢".

    MariaDB takes "1_0" for 1: a lock of 10 would not protect that row.
    """
    if isinstance(value, str) and not _NUMBER.fullmatch(value):
        raise ValueError(value)
    return value


REFUSALS: Final = (ValueError, TypeError, ArithmeticError, AttributeError, LookupError, NotImplementedError)
"""What a converter raises for a value that is no key; the program's own types may raise any of them."""


class AmbiguousKey(ValueError):
    """A value that databases read differently; the text of the error is what to give instead."""


def refuse_rounded(number: Decimal, places: int) -> None:
    """Raise AmbiguousKey for a number with more digits after the point than its column has."""
    _, digits, exponent = number.as_tuple()
    if isinstance(exponent, int) and exponent < -places and any(digits[exponent + places :]):
        raise AmbiguousKey(f"give the number with {places} digits after the point, as databases round it")


@dataclass(frozen=True, slots=True)
class Kind:
    """A model in a lock's name: each spelling of one of its keys becomes the form that the database returns.

    Attributes:
        label: The text that stands for the model in names.
        converters: One function for each column of the key. A value that it refuses with an error is no key.
        key_of: Returns the key of an instance of the model, and None for any other value.
        takes: For each column the types that only its converter accepts: float and bool have no text of their own.
    """

    label: str
    converters: tuple[Callable[[Any], Any], ...]
    key_of: Callable[[Any], Sequence[Any] | None]
    takes: tuple[tuple[type, ...], ...] = ()

    def read_key(self, values: Sequence[Any]) -> tuple[list[Any], int]:
        """Return the key with which these parts begin, and how many of the parts it took.

        A composite key is one tuple or list, or as many parts as it has columns. Raises NoSuchKey for a value that
        cannot be such a key, and TypeError for a value that has no text at all.
        """
        first, width = values[0], len(self.converters)
        key, used = self.key_of(first), 1
        if key is None:
            key = first if width > 1 and isinstance(first, tuple | list) else values[:width]
            used = 1 if key is first else width
        if len(key) != width:
            raise NoSuchKey(self.label, key=key)
        takes = self.takes or ((),) * width
        return [self._converted(*each) for each in zip(self.converters, takes, key, strict=True)], used

    def _converted(self, convert: Callable[[Any], Any], takes: tuple[type, ...], value: Any) -> Any:
        if type(value) not in takes:
            _text(value)  # A converter such as str() would accept any value, also one whose text is an address.
        try:
            return convert(value)
        except AmbiguousKey as error:
            raise NoSuchKey(self.label, key=value, reason=str(error)) from None
        except REFUSALS:
            raise NoSuchKey(self.label, key=value) from None


def with_keys(parts: Sequence[Any], kind_of: Callable[[Any], Kind | None]) -> list[Any]:
    """Replace each model among the parts by its label, and the key that follows it by its one form."""
    found: list[Any] = []
    index = 0
    while index < len(parts):
        kind = kind_of(parts[index])
        found.append(parts[index] if kind is None else kind.label)
        index += 1
        if kind is not None and index < len(parts) and kind_of(parts[index]) is None:
            key, used = kind.read_key(parts[index:])
            found += key
            index += used
    return found


@lru_cache(maxsize=1024, typed=True)
def canonical(name: str) -> str:
    """Return the name of a text whose parts are already joined with ":"; escapes are kept, as in a URL.

    Use `join` for parts that come from outside: in this text a ":" separates parts, and "%41" is "A". Raises TypeError
    for a value that is not a str, and ValueError for an empty part or a name that is too long.
    """
    if not isinstance(name, str):
        raise TypeError(f"a lock's name is text, not {type(name).__name__}: {name!r:.80}")
    name = str.__str__(name)  # A subclass may define another `__str__`, which keys and statements would use.
    if not _PLAIN.fullmatch(name):
        parts = name.encode(errors="surrogatepass").split(b":")
        name = ":".join([quote(unquote_to_bytes(part), safe="") for part in parts])
    if "" in name.split(":"):
        raise ValueError(f"a lock's name has no empty parts: {name!r:.80}")
    return _checked(name)


def _refuse_joined(text: str) -> None:
    """Raise ValueError for a first part that looks like a joined name, because its ":" would be escaped."""
    apart = ", ".join(repr(int(each) if each.isdecimal() and each.isascii() else each) for each in text.split(":"))
    raise ValueError(
        f"the first part of a lock's name must not contain ':'. For the lock that logs show as {text[:80]!r}, "
        f"give its parts one by one, {apart[:80]}; for a text that is data, put a word before it that says what it is"
    )


def _encoded(part: object) -> str:
    text = str(part) if type(part) in _EXACT_TYPES else _text(part)
    if not text:
        raise ValueError("a part of a lock's name is empty: 'order:' would lock all orders without a key")
    if isinstance(text, bytes):
        return quote(text, safe="")
    return text if _UNRESERVED.fullmatch(text) else quote(text, safe="", errors="surrogatepass")


def _text(part: object) -> str | bytes:
    """Return the text of a value by its type; raises TypeError for a value whose text could differ between processes.

    The order of the checks matters. A bool is an int, and its text would be that of 0 or 1. An Enum member that equals
    its value must have the name of the value. A subclass of str, int or bytes may define any `__str__`, so its text is
    taken by the method of its base.
    """
    kind = type(part)
    if isinstance(part, bool) or (isinstance(part, Number) and not isinstance(part, Rational | Decimal)):
        raise _no_text(part)
    if isinstance(part, Enum) and type(part.value) is not object and issubclass(kind, type(part.value)):
        return _text(part.value)
    if issubclass(kind, str):
        return str.__str__(part)
    if issubclass(kind, bytes | bytearray | memoryview):
        return bytes(part)  # type: ignore[call-overload,no-any-return]
    if issubclass(kind, Integral):
        return str(int(part))  # type: ignore[call-overload]
    if issubclass(kind, Decimal):
        return _decimal(part)  # type: ignore[arg-type]
    return _moment(part) if isinstance(part, date | time) else _own_text(part)


def _decimal(number: Decimal) -> str:
    """Return the one text of all equal numbers: 1.0, 1.00 and 1 are equal, and so are 1E+3 and 1000."""
    if not number.is_finite():
        raise ValueError(f"a part of a lock's name must be a finite number, not {number}")
    if number == 0:
        return "0"
    if not -MAX_NAME_BYTES < number.adjusted() < MAX_NAME_BYTES:
        raise ValueError(f"a lock's name has at most {MAX_NAME_BYTES} bytes, and {number} has more digits")
    text = f"{number:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _moment(moment: date | time) -> str:
    if isinstance(moment, datetime):
        is_aware = moment.utcoffset() is not None
        return (moment.astimezone(UTC) if is_aware else moment).isoformat(" ")
    if isinstance(moment, time) and moment.utcoffset() is not None:
        raise TypeError(f"a time of day with a zone has no one text: give the whole datetime instead of {moment}")
    return moment.isoformat()


def _own_text(part: object) -> str:
    """Return the text that a type defines; raises TypeError if it contains an address, as Python's default does.

    Such a text looks fine in one process, but "<Order object at 0x7f…>" is a different lock in every other process.
    """
    if isinstance(part, type | Iterator | NoneType) or type(part).__str__ is object.__str__:
        raise _no_text(part)
    if _shows_contents(type(part)):
        raise TypeError(
            f"a part of a lock's name is text, a number or a key, not {type(part).__name__}, whose text is its "
            "contents, not a key: give the attribute that is its key, in @locked by its path, as in 'payload.order_id'"
        )
    text = str(part)
    if _ADDRESS.search(text) or (text.startswith("<") and text == repr(part)):
        raise _no_text(part)
    return text


def _shows_contents(kind: type) -> bool:
    """Return whether the text of a type is all that a value contains: each payload for one key would be another lock.

    A Pydantic model that defines its own text says what its key is.
    """
    if issubclass(kind, BaseException | Mapping) or hasattr(kind, "__html__") or hasattr(kind, "__array__"):
        return True
    return getattr(kind.__str__, "__module__", "") in _PRINTS_FIELDS


def _no_text(part: object) -> TypeError:
    """Return the error for a value; it does not show the value, whose `repr` may be long, secret, or a query."""
    what = f"not {type(part).__name__}"
    if isinstance(part, bool | Number | NoneType):
        what += f": {part!r:.80}"
    if isinstance(part, float):
        what += "; 0.1 + 0.2 and 0.3 would be two locks, so give a Decimal or an int"
    elif isinstance(part, type):
        what = f"not the class {part.__name__}"
    elif hasattr(type(part), "acquire"):
        what += (
            ": pass several locks, and nothing else, to one lock(); above a function, write one @locked for each lock"
        )
    elif isinstance(part, Collection | Iterator) and not hasattr(part, "read"):  # but no file
        what += ": pass several parts, or several locks, one by one, lock(*them)"
    elif callable(part) and (name := getattr(part, "__name__", "")):
        what += f" {name!r}: call it, {name}()"
    elif not isinstance(part, bool | Number | NoneType):
        what += ", whose type defines no text (__str__) that is the same in every process: give its key"
    return TypeError(f"a part of a lock's name is text, a number or a key, {what}")


def _checked(name: str) -> str:
    if len(name) > MAX_NAME_BYTES:
        raise ValueError(
            f"a lock's name has at most {MAX_NAME_BYTES} bytes when encoded, and {name[:60]!r}… has {len(name)}: "
            "put a hash in the place of a long part"
        )
    return name
