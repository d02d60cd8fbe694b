"""The mutants themselves: which faults are put into a file, which tests they meet, and which results are kept."""

import builtins
from typing import Any

from tests.mutants import lua, python, recording, runner, sql
from tests.mutants.mutant import Mutant
from tests.mutants.parts import PARTS

CODE = '''
def count(limit: int = 3) -> int:
    """Return how many."""
    if limit <= 0 and not found:
        raise ValueError("limit < 1")
    total.value = limit + 1
    return total
'''


def faults(found: list[Mutant]) -> set[tuple[int, str]]:
    return {(each.line, each.after) for each in found}


def test_python_is_changed_where_it_decides_and_not_where_it_tells():
    found = faults(python.mutants("count.py", CODE))
    assert found == {
        (2, "def count(limit: int=4) -> int:"),
        (4, "if limit < 0 and (not found):"),
        (4, "if limit <= 0 or not found:"),
        (4, "if not (limit <= 0 and (not found)):"),
        (4, "if limit <= 1 and (not found):"),
        (5, "pass"),
        (6, "pass"),
        (6, "total.value = limit - 1"),
        (6, "total.value = limit + 2"),
        (7, "return None"),
    }


def test_every_python_mutant_can_be_compiled_and_differs():
    path = "dlock_core/sql/row_locks.py"
    found = python.mutants(path, (runner.ROOT / path).read_text())
    assert len(found) > 20
    for each in found:
        compile(each.source, each.file, "exec")
        assert each.before != each.after, each


def test_lua_is_changed_outside_texts_and_comments():
    text = "-- a < b\nif a < 1 and b == 'x < y' then\n  redis.call('DEL', key)\nend\n"
    assert faults(lua.mutants("x.lua", text)) == {
        (2, "if a <= 1 and b == 'x < y' then"),
        (2, "if a < 1 or b == 'x < y' then"),
        (2, "if a < 1 and b ~= 'x < y' then"),
        (2, "if a < 2 and b == 'x < y' then"),
        (2, "if not (a < 1 and b == 'x < y') then"),
        (3, "(nothing)"),
    }


def test_sql_is_changed_and_other_texts_are_not():
    assert not sql.is_sql("a < b and so on")
    assert set(sql.changed("UPDATE f SET t = :t WHERE t <= :t AND n = 1")) == {
        "UPDATE f SET t <> :t WHERE t <= :t AND n = 1",
        "UPDATE f SET t = :t WHERE t < :t AND n = 1",
        "UPDATE f SET t = :t WHERE t <= :t OR n = 1",
        "UPDATE f SET t = :t WHERE t <= :t AND n <> 1",
    }


def test_sql_that_is_written_in_parts_is_changed_in_each():
    found = faults(python.mutants("free.py", 'FREE = f"till <= {NOW} AND till > {THEN}"\nTOLD = f"a < b {NOW}"\n'))
    assert found == {
        (1, "FREE = f'till < {NOW} AND till > {THEN}'"),
        (1, "FREE = f'till <= {NOW} OR till > {THEN}'"),
        (1, "FREE = f'till <= {NOW} AND till >= {THEN}'"),
    }


def test_every_part_has_files_and_tests_that_exist():
    for name, part in PARTS.items():
        assert all(any(runner.ROOT.glob(pattern)) for pattern in part.files), name
        for path in " ".join(part.tests).split():
            assert (runner.ROOT / path).exists(), (name, path)


def test_what_runs_a_line_of_python_is_noted_and_the_file_does_the_same():
    noted: set[str] = set()
    vars(builtins)[recording.NOTES] = noted.add
    try:
        names: dict[str, Any] = {}
        exec(recording.noting("a.py", SIGN), names)
        noted.clear()
        assert (names["sign"](5), names["sign"].__doc__) == (1, "Return 1 or -1.")
        assert noted == {"a.py:5", "a.py:6"}
        noted.clear()
        assert names["sign"](-5) == -1
        assert noted == {"a.py:5", "a.py:7", "a.py:8"}
    finally:
        del vars(builtins)[recording.NOTES]


SIGN = '''"""Numbers."""
from __future__ import annotations
def sign(number):
    """Return 1 or -1."""
    if number > 0:
        return 1
    with suppress(ValueError):
        return -1
from contextlib import suppress
'''


def test_what_runs_a_block_of_a_lua_script_is_noted_at_its_beginning():
    text = "if a then\n  b()\nelse\n  for i = 1, 2 do\n    c()\n  end\nend\nd()\n"
    lines = recording.noting("x.lua", text).splitlines()
    assert [line for line in lines if "runs" not in line] == text.splitlines()
    assert [found for line in lines for found in recording.LOGGED.findall(line)] == [
        f"x.lua:{at}" for at in (0, 1, 3, 4)
    ]
    blocks = {lua.block(text.splitlines(), at) for at in (1, 3, 4, 7)}
    assert blocks == {1, 3, 4, 0}


def test_a_mutant_meets_the_tests_that_run_its_statement_the_quickest_first_and_one_of_each_function():
    mutant = next(each for each in python.mutants("count.py", CODE) if each.line == 6)
    here, elsewhere = {"count.py:6"}, {"count.py:7"}
    tests = [
        recording.Test("t.py::slow", 2.0, here),
        recording.Test("t.py::other", 0.1, elsewhere),
        recording.Test("t.py::quick[1]", 0.2, here),
        recording.Test("t.py::quick[2]", 0.3, here),
        recording.Test("t.py::very_slow[1]", 95.0, here),
        recording.Test("t.py::very_slow[2]", 95.0, here),
    ]
    choice = runner.Choice(tests)
    assert [test.name for test in choice.of(mutant)] == ["t.py::quick[1]", "t.py::slow", "t.py::very_slow[1]"]
    choice.killers["count.py"]["t.py::quick[2]"] += 1
    assert choice.of(mutant)[0].name == "t.py::quick[2]"


def test_a_mutant_of_a_declaration_meets_the_tests_of_what_is_declared():
    mutant = next(each for each in python.mutants("count.py", CODE) if each.line == 2)
    inside, outside = recording.Test("t.py::a", 0.1, {"count.py:4"}), recording.Test("t.py::b", 0.1, {"other.py:4"})
    assert runner.Choice([inside, outside]).of(mutant) == [inside]


def test_results_are_kept_for_the_same_text_only(tmp_path):
    results = runner.Results(tmp_path / "results" / "part.jsonl")
    first, second = (lua.mutants("x.lua", f"local a = {number}\n")[0] for number in (1, 2))
    results.add(first, "killed")
    assert results.read() == {first.key: "killed"}
    assert second.key not in results.read()


def test_a_sample_is_the_same_for_the_same_seed():
    found = runner.mutants_of(PARTS["release"])
    assert runner.sample(found, 5, 1) == runner.sample(found, 5, 1) != runner.sample(found, 5, 2)
    assert runner.sample(found, 0, 1) == found
