"""The console script as a process: every command, its exit code, a terminal, Ctrl-C, and what happens without click."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from sqlalchemy import create_engine

import dlock_core
from dlock_core import Lock
from sqla_dlock.fencing import metadata, table
from tests.cli.running import clean, dlock, script

DAY = 86_400_000_000
WITHIN = 60.0
HEEDING = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells have it ignored in the background
from dlock_core.cli import main
main()
"""
AT_TERMINAL = f"import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0){HEEDING}"


@pytest.fixture
def store(backend, redis_server) -> str:
    return redis_server.url


def test_console_script_is_installed():
    (point,) = entry_points(group="console_scripts", name="dlock")
    assert point.value == "dlock_core.cli:main"


def test_list_shows_the_lease_and_ends_with_0(backend, store):
    with Lock(backend, "order:42") as lease:
        ran = script("list", "--store", store)
        told = json.loads(dlock("list", "--format", "json", "--store", store).out)
    assert (ran.code, ran.err) == (0, "")
    assert "order:42" in ran.out
    assert str(lease.token) in ran.out  # a pipe is wide
    assert [entry["name"] for entry in told["entries"]] == ["order:42"]


def test_show_tells_all_of_one_lock_or_ends_with_1(backend, store):
    with Lock(backend, "order:42") as lease:
        ran = script("show", "order:42", "--store", store)
    assert ran.code == 0
    assert f"token: {lease.token}" in ran.out
    missing = dlock("show", "order:43", "--store", store)
    assert (missing.code, missing.out) == (1, "")
    assert "'order:43' has no holder and no waiters" in missing.err


def test_store_that_is_down_is_a_line_of_the_listing_and_the_others_are_shown(backend, store):
    with Lock(backend, "order:42"):
        ran = script("list", "--store", store, "--store", "reports=redis://:s3cr3t@localhost:1")
    assert ran.code == 1
    assert "order:42" in ran.out
    assert re.search(r"^reports: .*refused", ran.out, re.M)
    assert "1 of 2 stores and databases could not be read" in ran.err
    assert "s3cr3t" not in ran.out + ran.err
    assert "Traceback" not in ran.err


def test_release_without_a_terminal_leaves_a_line_in_the_log(backend, store):
    lease = Lock(backend, "order:42").acquire()
    ran = script("release", "order:42", "--no-input", DLOCK_URL=store)
    assert ran.code == 0
    assert "was ended by" in ran.err  # the log
    lease.release()


def test_release_asks_and_shows_what_it_asks_about(backend, store):
    lease = Lock(backend, "order:42").acquire()
    shown, code = at_terminal(["release", "order:42", "--store", store], when="[y/N]", answer=b"y\n")
    assert code == 0
    assert f"token {lease.token}" in shown
    assert f"pid {os.getpid()}" in shown
    assert "released order:42" in shown
    lease.release()


def test_watch_refreshes_the_terminal_until_ctrl_c(backend, store):
    with Lock(backend, "order:42"):
        shown, code = at_terminal(["watch", "--interval", "0.1", "--store", store], when="order:42", answer=b"\x03")
    assert code == 0
    assert "\x1b[?1049h" in shown  # it uses the alternate screen, and leaves it at the end
    assert "\x1b[?1049l" in shown


def test_watch_without_a_terminal_prints_one_snapshot_after_the_other(backend, store):
    command = [sys.executable, "-c", HEEDING, "watch", "--interval", "0.1", "--store", store, "--format", "json"]
    with (
        Lock(backend, "order:42"),
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=clean()) as process,
    ):
        seen = [json.loads(process.stdout.readline()) for _ in range(3)]
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=WITHIN)
    assert process.returncode == 0
    assert [[entry["name"] for entry in snapshot["entries"]] for snapshot in seen] == [["order:42"]] * 3


def test_snapshots_of_tables_have_the_time_above_them(monkeypatch):
    sleeps = iter([None, KeyboardInterrupt])

    def sleep(seconds: float) -> None:
        assert seconds == 0.5
        if (what := next(sleeps)) is not None:
            raise what

    monkeypatch.setattr("dlock_core.cli.listing.time.sleep", sleep)
    ran = dlock("watch", "--interval", "0.5", "--store", "memory://")
    assert ran.code == 0
    assert len(re.findall(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d$", ran.out, re.M)) == 2


def test_doctor_ends_with_1_when_something_is_unsafe():
    ran = script("doctor", "--store", "memory://")
    assert (ran.code, "1 of 1 findings are unsafe" in ran.err) == (1, True)


def test_version_is_shown():
    assert script("--version").out == f"dlock {dlock_core.__version__}\n"


def test_output_into_a_pipe_has_no_trailing_blanks(backend, store):
    with Lock(backend, "order:42"), Lock(backend, "order:43"):
        for verb in ("list", "doctor"):
            ran = script(verb, "--store", store, COLUMNS="80")
            assert ran.out.strip()
            assert [line for line in ran.out.split("\n") if line != line.rstrip()] == []


def test_line_of_a_release_is_not_broken_within_a_word(backend, store):
    name = "report:" + 20 * "quarterly"
    lease = Lock(backend, name).acquire()
    ran = script("release", name, "--no-input", "--store", store, COLUMNS="60")
    assert f"released {name} in" in ran.out
    assert ran.out.count("\n") == 1
    lease.release()


def test_purge_tidies_the_fence_of_a_database(tmp_path):
    url = f"sqlite:///{tmp_path}/shop.db"
    now = int(time.time() * 1_000_000)
    engine = create_engine(url)
    metadata.create_all(engine)
    with engine.begin() as connection:
        for name, token in {"old": now - 40 * DAY, "young": now - DAY}.items():
            connection.execute(table.insert().values(name=name, token=token, holder="a", s_token=0))
    ran = script("purge", "--database", url, "--format", "json")
    with engine.begin() as connection:
        left = {row.name: row.token for row in connection.execute(table.select())}
    engine.dispose()
    assert json.loads(ran.out) == {"schema": 1, "database": "sqlite", "days": 30, "removed": 1}
    assert left == {"": now - 40 * DAY, "young": now - DAY}


@pytest.mark.parametrize("verb", ["doctor", "purge"])
def test_file_of_sqlite_that_is_missing_is_told_and_not_made(verb, tmp_path):
    ran = dlock(verb, "--database", f"shop=sqlite:///{tmp_path}/shpo.db")
    assert ran.code == 1
    assert "does not exist: check the path" in " ".join((ran.out + ran.err).split())
    assert list(tmp_path.iterdir()) == []


def test_purge_of_a_database_without_a_fence_is_one_line(tmp_path):
    (tmp_path / "empty.db").touch()
    ran = dlock("purge", "--database", f"shop=sqlite:///{tmp_path}/empty.db")
    assert (ran.code, ran.err) == (1, "shop: no such table: dlock_fence")


@pytest.mark.parametrize(
    "wrong", [["nosuch"], ["list", "--nosuch"], ["show"], ["watch", "--interval", "nan"], ["purge", "--days", "0"]]
)
def test_wrong_usage_ends_with_2(wrong):
    assert dlock(*wrong).code == 2


@pytest.mark.parametrize("missing", ["click", "rich"])
def test_without_click_or_rich_it_says_what_to_install(missing):
    program = f"import sys; sys.modules[{missing!r}] = None; from dlock_core.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "list"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "pip install 'dlock-orm[cli]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_terminal_that_lacks_a_character_shows_another(backend, store):
    with Lock(backend, "order:" + "x" * 300):
        ran = script("list", "--store", store, COLUMNS="80", PYTHONIOENCODING="ascii")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.isascii()


def at_terminal(arguments: list[str], *, when: str, answer: bytes) -> tuple[str, int]:
    """Run a command at a terminal, answer once `when` is shown, and return the whole output and the exit code."""
    ours, theirs = pty.openpty()
    environment = {**clean(), "TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    process = subprocess.Popen(
        [sys.executable, "-c", AT_TERMINAL, *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
        start_new_session=True,
    )
    os.close(theirs)
    shown, answered = b"", False
    try:
        while part := _read(ours):
            shown += part
            if not answered and when.encode() in shown:
                os.write(ours, answer)
                answered = True
        return shown.decode(errors="replace"), process.wait(WITHIN)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # the other end is closed
        return b""


def test_directory_of_commands_needs_neither_django_nor_sqlalchemy():
    program = "import sys, dlock_core.cli.console as c; assert not {'django', 'sqlalchemy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, cwd=Path(__file__).parent.parent.parent)
