"""The mutants themselves: which faults are put into a file, and that a run goes on where it was broken off."""

from tests.mutants import lua, python, runner, sql
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
        assert each.before != each.after or each.before.endswith("…"), each


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
    assert list(sql.changed("a < b and so on")) == []
    assert set(sql.changed("UPDATE f SET t = :t WHERE t <= :t AND n = 1")) == {
        "UPDATE f SET t <> :t WHERE t <= :t AND n = 1",
        "UPDATE f SET t = :t WHERE t < :t AND n = 1",
        "UPDATE f SET t = :t WHERE t <= :t OR n = 1",
        "UPDATE f SET t = :t WHERE t <= :t AND n <> 1",
    }


def test_every_part_has_files_and_tests_that_exist():
    for name, part in PARTS.items():
        assert all(any(runner.ROOT.glob(pattern)) for pattern in part.files), name
        for stage in part.stages:
            for path in stage.partition(" -k ")[0].split():
                assert (runner.ROOT / path).exists(), (name, path)


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
