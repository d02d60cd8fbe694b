"""A drawn snapshot fits the terminal, shows who holds and who waits, and never moves the cursor."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from dlock_core.cli.listing import Details, Listing
from dlock_core.inspect import Unreadable
from tests.cli.snapshots import drawn, entry, snapshot, waiter

LONG = "invoice:" + "2026-11-21-" * 20 + "end"

WIDTHS = pytest.mark.parametrize("width", [40, 80, 200])


@WIDTHS
def test_no_line_is_wider_than_the_terminal_and_every_party_is_on_one_of_its_own(width):
    entries = [entry(LONG), waiter(LONG, described="GET /" + "x" * 300), entry("report", mode="shared", source="other")]
    lines = drawn(Listing(snapshot(*entries)), width)
    assert max(map(cell_len, lines)) <= width
    assert lines[-1].rstrip() == "2 holders, 1 waiter"
    for start in ("POST", "waits (1): GET /x"):
        assert sum(start in line for line in lines) == (2 if start == "POST" else 1), lines


@WIDTHS
def test_long_name_loses_its_middle(width):
    lines = drawn(Listing(snapshot(entry(LONG))), width)
    (line,) = [line for line in lines if "invoic" in line]
    assert "…" in line
    assert "end" in line


def test_wide_terminal_shows_everything():
    entries = [
        entry("order:42"),
        waiter("order:42", "web2/9/1"),
        entry("shop_order 42", "pg/17", kind="row", source="shop", mode="FOR UPDATE", token=None, expires_in=None),
    ]
    head, *rows = [line.split() for line in drawn(Listing(snapshot(*entries)), 200)]
    assert head == ["source", "kind", "lock", "mode", "who", "for", "ttl", "left", "token"]
    assert rows[0][:4] == ["default", "lease", "order:42", "exclusive"]
    assert rows[0][-1] == "1795249528080225"
    assert rows[1][:3] == ["exclusive", "waits", "(1):"]
    assert rows[2][:5] == ["shop", "row", "shop_order", "42", "FOR"]


def test_columns_that_say_nothing_new_are_left_out():
    head = drawn(Listing(snapshot(entry())), 200)[0]
    assert "source" not in head
    assert "kind" not in head


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.text(min_size=1, max_size=80), st.text(max_size=120), st.booleans(), st.booleans()), max_size=6
    ),
    st.integers(20, 150),
)
def test_whatever_names_and_owners_say_no_line_breaks_and_no_escape_gets_through(found, width):
    entries = [
        (entry if holds else waiter)(
            name, f"p{n % 3}", described=told, owner={told: name}, mode="shared" if shared else "x"
        )
        for n, (name, told, holds, shared) in enumerate(found)
    ]
    shown = snapshot(*entries, unreadable=[Unreadable("s\x1b[2J", "no\nanswer")])
    for what in (Listing(shown), Details(shown, entries)):
        for line in drawn(what, width):
            assert cell_len(line) <= width, line
            assert line.isprintable(), line


def test_markup_in_an_owner_stays_text():
    (line,) = [
        line
        for line in drawn(Listing(snapshot(entry(described="[red]GET[/red] :smile: [link=x]"))), 200)
        if "GET" in line
    ]
    assert "[red]GET[/red] :smile: [link=x]" in line


def test_deadlock_is_named_and_drawn_as_a_tree():
    entries = [
        entry("order:42", "a", described="POST /ship"),
        waiter("row 7", "a", kind="row", source="shop", described="POST /ship"),
        entry("row 7", "b", kind="row", source="shop", described="nightly.py", token=None),
        waiter("order:42", "b", described="nightly.py"),
    ]
    lines = [line.rstrip() for line in drawn(Listing(snapshot(*entries)), 80)]
    assert "deadlock:" in lines
    assert any("waits for lease order:42" in line for line in lines)
    assert any("waits for row row 7" in line for line in lines)
    assert "(see above)" in "".join(lines)


def test_chain_begins_with_the_one_who_waits_for_nobody():
    entries = [
        entry("a", "p1", described="first"),
        waiter("a", "p2", described="second"),
        entry("b", "p2", described="second"),
        waiter("b", "p3", described="third"),
    ]
    lines = [line.rstrip() for line in drawn(Listing(snapshot(*entries)), 80)]
    start = lines.index("first")
    assert lines[start + 1] == "└── second waits for lease a, 2.6 s"
    assert lines[start + 2] == "    └── third waits for lease b, 2.6 s"


@WIDTHS
def test_long_chain_goes_on_below_where_there_is_no_more_room(width):
    holders = [entry(f"lock{n}", f"p{n}", described=f"actor{n}") for n in range(200)]
    waiters = [waiter(f"lock{n}", f"p{n + 1}", described=f"actor{n + 1}") for n in range(199)]
    lines = drawn(Listing(snapshot(*holders, *waiters)), width)
    tree = lines[lines.index(next(line for line in lines if "──" in line)) - 1 :]
    assert max(map(cell_len, lines)) <= width
    assert [int(n) for n in re.findall(r"── actor(\d+)", "\n".join(tree))] == list(range(1, 200))
    assert any("(see below)" in line for line in tree)


def test_query_of_many_lines_is_told_on_one():
    holder = entry(owner={"query": "SELECT *\n  FROM orders\tWHERE id = 1"})
    lines = drawn(Details(snapshot(holder), [holder]), 80)
    assert "    query: SELECT * FROM orders WHERE id = 1" in [line.rstrip() for line in lines]


def test_list_without_a_chain_needs_no_tree():
    lines = drawn(Listing(snapshot(entry(), waiter(), waiter(actor="web3/1/1", position=2))), 80)
    assert not any("──" in line for line in lines)


def test_what_was_left_out_or_not_read_is_said():
    lines = drawn(Listing(snapshot(left_out={"shop": 900}, unreadable=[Unreadable("reports", "refused")])), 80)
    assert [line.rstrip() for line in lines] == [
        "holders and waiters: unknown", "shop: 900 more locks without waiters", "reports: refused",
    ]  # fmt: skip
