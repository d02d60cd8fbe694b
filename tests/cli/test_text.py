"""Text that comes from others is safe on a terminal."""

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from dlock_core.cli.layout import plain, seconds, shorten

NASTY = "\x1b[2J\x07\r\n\t\u202e\u2066\u200b\x9b\ud800\u2028"


def test_nothing_of_a_name_reaches_the_terminal_but_what_is_printed():
    assert plain(f"order{NASTY}42") == f"order?[2J{'?' * (len(NASTY) - 4)}42"
    assert plain("[red]42[/red] :smile: ä 錠") == "[red]42[/red] :smile: ä 錠"


def test_long_name_keeps_both_ends():
    assert shorten("order:2026-11-21:customer:4711:line:3", 15) == "order:2…:line:3"


@given(st.text(), st.integers(0, 60))
def test_shortened_text_never_takes_more_cells_than_it_may(text, width):
    short = shorten(plain(text), width)
    assert cell_len(short) <= width
    assert short == plain(text) or cell_len(plain(text)) > width


def test_times_are_written_for_people():
    assert [seconds(time) for time in (None, 0.04, 119.9, 250.0, 11100.0)] == [
        "?", "0.0 s", "119.9 s", "4 min 10 s", "3 h 5 min",
    ]  # fmt: skip
