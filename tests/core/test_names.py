"""Names: one form, whatever they were made of, and two parts never read as one."""

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlock_core.names import LONGEST, canonical, join

PARTS = st.lists(
    st.text(min_size=1, max_size=12) | st.integers() | st.binary(min_size=1, max_size=8), min_size=1, max_size=4
)


def test_parts_are_joined_with_colons() -> None:
    assert join("order", 42) == "order:42"
    assert join("order", UUID(int=7)) == "order:00000000-0000-0000-0000-000000000007"


def test_a_colon_inside_a_part_does_not_separate() -> None:
    assert join("a:b") == "a%3Ab"
    assert join("a", "b") == "a:b"


@given(PARTS, PARTS)
def test_different_parts_make_different_names(one: list[object], other: list[object]) -> None:
    def text(part: object) -> bytes:
        return part if isinstance(part, bytes) else str(part).encode(errors="surrogatepass")

    if len(join(*one)) <= LONGEST and len(join(*other)) <= LONGEST:
        assert (join(*one) == join(*other)) == ([text(part) for part in one] == [text(part) for part in other])


@given(PARTS)
def test_joined_name_is_canonical_plain_ascii(parts: list[object]) -> None:
    name = join(*parts)
    assert canonical(name) == name
    assert name.isascii()
    assert name.isprintable()
    assert not set(name) & set(" {}*?[]'\"\\/\n\0")


@given(st.text(min_size=1, max_size=40))
def test_canonical_form_of_a_canonical_name_is_itself(text: str) -> None:
    try:
        name = canonical(text)
    except ValueError:
        assert "" in text.split(":")
        return
    assert canonical(name) == name


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("order:42", "order:42"),
        ("a b", "a%20b"),
        ("%41", "A"),
        ("%3a", "%3A"),
        ("50%", "50%25"),
        ("ä", "%C3%A4"),
        ("%c3%a4", "%C3%A4"),
    ],
)
def test_one_name_however_it_is_escaped(written: str, name: str) -> None:
    assert canonical(written) == name


def test_case_matters() -> None:
    assert canonical("Order") != canonical("order")


@pytest.mark.parametrize("part", [None, True, 1.5, [], (), {}, set(), 1j, frozenset()], ids=repr)
def test_part_that_is_no_text_number_or_key_is_refused(part: object) -> None:
    with pytest.raises(TypeError, match=type(part).__name__):
        join("order", part)


@pytest.mark.parametrize("parts", [(), ("",), ("order", ""), (b"",)])
def test_missing_part_is_refused(parts: tuple[object, ...]) -> None:
    with pytest.raises(ValueError, match=r"empty|needs a name"):
        join(*parts)


def test_longest_name_has_512_bytes_when_encoded() -> None:
    assert len(join("x" * 512)) == len(canonical("x" * 512)) == 512
    for too_long in ("x" * 513, "ä" * 86):
        with pytest.raises(ValueError, match="at most 512 bytes"):
            join(too_long)
        with pytest.raises(ValueError, match="at most 512 bytes"):
            canonical(too_long)


def test_error_quotes_only_the_beginning_of_a_long_name() -> None:
    with pytest.raises(ValueError) as caught:
        canonical("x" * 100_000)
    assert len(str(caught.value)) < 200
