"""The text of a statement shows what it does: only what certainly just reads counts as a read."""

import pytest

from dlock_core.sql.statement_kinds import (
    commits_implicitly,
    ends_transaction,
    is_data_statement,
    may_run_another,
    savepoint_changes,
    surely_reads,
)

READS = [
    "SELECT 1",
    "  select * from t where a = 'delete from x; --' for update",
    'SELECT "update", `delete` FROM t',
    "(SELECT 1) UNION (SELECT 2)",
    "WITH a AS (SELECT 1) SELECT * FROM a FOR NO KEY UPDATE",
    "/* job 12 */ SELECT 1 -- why\n",
    "SHOW search_path",
    "EXPLAIN SELECT 1",
    "PRAGMA foreign_keys",
    "SET timezone TO 'UTC'",
    "BEGIN IMMEDIATE",
    "LISTEN jobs",
    "SELECT replace(a, 'x', 'y') FROM t;",
    "SELECT [a b], a['x; DELETE FROM t'] FROM t",
]
WRITES = [
    "UPDATE t SET a = 1",
    "/* job 12 */ UPDATE t SET a = 1",
    "-- why\nUPDATE t SET a = 1",
    "-- it's\nUPDATE t SET a = 'x'",
    "; UPDATE t SET a = 1",
    "SELECT 1; UPDATE t SET a = 1",
    "BEGIN; UPDATE t SET a = 1; COMMIT",
    "EXPLAIN ANALYZE UPDATE t SET a = 1",
    "EXPLAIN (ANALYZE) DELETE FROM t",
    "WITH a AS (DELETE FROM t RETURNING *) SELECT * FROM a",
    "SELECT 1 INTO u",
    "CALL f()",
    "DO $$ BEGIN UPDATE t SET a = 1; END $$",
    "EXECUTE p",
    "PREPARE p AS UPDATE t SET a = 1",
    "SET STATEMENT max_statement_time = 1 FOR UPDATE t SET a = 1",
    "/*! UPDATE t SET a = 1 */",
    "SELECT '\\'; DELETE FROM t; --'",
    "/* a /* b */ SELECT 1 -- */ DELETE FROM t",
    "# x\nDELETE FROM t",
    "CREATE TABLE u (a int)",
    "TRUNCATE t",
    "COPY t FROM STDIN",
    "WITH [it's] AS (SELECT 1) INSERT INTO t SELECT * FROM [it's] WHERE 'x' = 'x'",
]


@pytest.mark.parametrize("sql", READS)
def test_statement_that_only_reads_is_known(sql: str) -> None:
    assert surely_reads(sql)


@pytest.mark.parametrize("sql", WRITES)
def test_no_disguise_of_a_write_passes_for_a_read(sql: str) -> None:
    assert not surely_reads(sql)


@pytest.mark.parametrize(
    "sql",
    [
        *("COMMIT", "/* c */ commit;", "ROLLBACK", "SELECT 1; COMMIT", "BEGIN", "START TRANSACTION"),
        *("/*!COMMIT*/", "/*!50000 COMMIT */", "/*M!100100 COMMIT*/", "\ufeffCOMMIT"),
        "/*! don't */ ; COMMIT; SELECT 'x'",
        *("# x\nCOMMIT", "# don't\nCOMMIT", "/* a /* nested */ */ COMMIT", "/* /* */ -- */ COMMIT"),
    ],
)
def test_end_of_a_transaction_is_known(sql: str) -> None:
    assert ends_transaction(sql)


@pytest.mark.parametrize("sql", ["ROLLBACK TO SAVEPOINT a", "ROLLBACK WORK TO a", "SELECT 'COMMIT'", "SAVEPOINT a"])
def test_savepoint_ends_no_transaction(sql: str) -> None:
    assert not ends_transaction(sql)


FUNCTION = "CREATE FUNCTION f() RETURNS trigger AS {0} BEGIN NEW.x = 1; RETURN NEW; END; {0} LANGUAGE plpgsql"


@pytest.mark.parametrize(
    "sql",
    [
        "DO $$ BEGIN PERFORM 1; END $$",
        "DO $$BEGIN PERFORM 1; COMMIT; END$$; SELECT 1",
        FUNCTION.format("$$"),
        FUNCTION.format("$body$"),
        "CREATE OR REPLACE FUNCTION f() RETURNS int BEGIN ATOMIC SELECT 1; END",
        "CREATE TRIGGER t AFTER INSERT ON a BEGIN UPDATE b SET x = 1; DELETE FROM c; END",
        "/* job 12 */ create temp trigger if not exists t after insert on a begin select 1; end",
        "CREATE DEFINER=`root`@`%` PROCEDURE p() BEGIN IF a THEN SELECT 1; END IF; COMMIT; END",
    ],
)
def test_block_of_a_function_or_trigger_ends_no_transaction(sql: str) -> None:
    assert not ends_transaction(sql)
    assert not surely_reads(sql)


@pytest.mark.parametrize(
    "sql",
    [
        f"{FUNCTION.format('$$')}; COMMIT",
        "CREATE TRIGGER t AFTER INSERT ON a EXECUTE FUNCTION f(); COMMIT",
        "SELECT 'a $$ b'; COMMIT; SELECT '$$'",
        "SELECT a$$b; COMMIT; SELECT c$$d",
        "-- $$\nCOMMIT; -- $$",
        "SELECT $1$; COMMIT; SELECT $1$",
        "CREATE TABLE function (a int); BEGIN; SELECT 1",
    ],
)
def test_end_of_a_transaction_is_not_hidden_by_what_looks_like_a_function(sql: str) -> None:
    assert ends_transaction(sql)


@pytest.mark.parametrize(
    "sql",
    [
        "SAVEPOINT x",
        "SELECT 1; SAVEPOINT x",
        "/* SELECT */ ROLLBACK TO x",
        " SELECT 1",
        "select 1",
        "WITH a AS (SELECT 1) SELECT 1",
    ],
)
def test_what_may_be_more_than_one_statement_on_rows_is_looked_at_closely(sql: str) -> None:
    assert not is_data_statement(sql)


@pytest.mark.parametrize(
    "sql", ["SELECT 1", "UPDATE t SET a = 'SAVEPOINT x'", "INSERT INTO t VALUES (1)", "DELETE FROM t"]
)
def test_plain_statement_on_rows_needs_no_closer_look(sql: str) -> None:
    assert is_data_statement(sql)


@pytest.mark.parametrize(
    "sql",
    [
        *("# x\nCOMMIT", "SET STATEMENT max_statement_time=1 FOR COMMIT", "/*!FLUSH TABLES*/", "START SLAVE"),
        *("SET autocommit=1", "set @@session.autocommit := ON", "SET sql_mode = '', autocommit = 'ON'"),
        *("LOCK TABLES t WRITE", "FLUSH TABLES", "ANALYZE TABLE t", "OPTIMIZE LOCAL TABLE t", "CHECK TABLE t"),
        *("CREATE TABLE t (a int)", "alter table t add b int", "TRUNCATE t", "DROP VIEW v", "RENAME TABLE t TO u"),
        *("CREATE PROCEDURE p() BEGIN SELECT 1; END", "SET DEFAULT ROLE NONE"),
    ],
)
def test_statement_with_which_mysql_commits_is_known(sql: str) -> None:
    assert commits_implicitly(sql)


@pytest.mark.parametrize(
    "sql",
    [
        *("SET autocommit = 0", "SET foreign_key_checks = 0", "ANALYZE SELECT 1", "ROLLBACK TO a", "SAVEPOINT a"),
        *("CREATE TEMPORARY TABLE t (a int)", "CREATE OR REPLACE TEMPORARY TABLE t (a int)", "DROP PREPARE p"),
        *("SET STATEMENT max_statement_time=1 FOR UPDATE t SET a = 1", "SELECT 1 # COMMIT", "SHOW TABLES"),
    ],
)
def test_statement_with_which_mysql_does_not_commit_is_let_through(sql: str) -> None:
    assert not commits_implicitly(sql)


@pytest.mark.parametrize(
    "sql",
    [
        *("CALL p()", "EXECUTE p", "EXECUTE IMMEDIATE 'COMMIT'", "SET STATEMENT max_statement_time=1 FOR CALL p()"),
        "SET STATEMENT max_statement_time=1 FOR CALL p((SELECT 1 FROM t FOR UPDATE))",
        *("/*!ROLLBACK*/ /*!TO a */", "IF 1 THEN COMMIT", "SELECT 1 # x\n; CALL p()", "MYSTERY"),
    ],
)
def test_statement_of_mysql_that_may_run_another_is_known(sql: str) -> None:
    assert may_run_another(sql)


@pytest.mark.parametrize("sql", ["select 1", "(SELECT 1)", "REPLACE INTO t VALUES (1)", "SAVEPOINT `a b`", "SET a = 1"])
def test_statement_of_mysql_that_runs_no_other_is_known(sql: str) -> None:
    assert not may_run_another(sql)


@pytest.mark.parametrize(
    ("sql", "changes"),
    [
        ("SAVEPOINT a1", [("SAVEPOINT", "a1")]),
        ('savepoint "a1" ;', [("SAVEPOINT", "a1")]),
        ("RELEASE SAVEPOINT A1", [("RELEASE", "a1")]),
        ("release a1", [("RELEASE", "a1")]),
        ("ROLLBACK /* x */ WORK TO -- x\n `a1`", [("ROLLBACK", "a1")]),
        ("ROLLBACK TO x; ROLLBACK TRANSACTION TO SAVEPOINT y", [("ROLLBACK", "x"), ("ROLLBACK", "y")]),
        *((f"SAVEPOINT {name}", []) for name in ("a$1", '"A"', '"a""1"', "'a1'", "[a1]", 'U&"a"', "ä")),
        *((f"ROLLBACK TO {name}", [("ROLLBACK", None)]) for name in ("a$1", '"A"', '"a""1"', "'a1'", "[a 1]", "ä")),
        ("RELEASE 'a1'", [("RELEASE", None)]),
        *((sql, [("ROLLBACK", None)]) for sql in ("ROLLBACK", "rollback and chain", "ABORT", "/* x */ abort work")),
        ("SET STATEMENT max_statement_time=1 FOR ROLLBACK", [("ROLLBACK", None)]),
        ("SELECT 1; ROLLBACK TO x", [("ROLLBACK", None)]),
        ("ROLLBACK # x\n TO a1", [("ROLLBACK", None)]),
        ("ROLLBACK TO /* /* */ b -- */ a", [("ROLLBACK", None)]),
        ("/*!ROLLBACK*/ /*!TO a1 */", [("ROLLBACK", None)]),
        ("WITH a AS (SELECT release FROM t) SELECT rollback FROM a", []),
        ("DO $$ BEGIN ROLLBACK; END $$", []),
    ],
)
def test_savepoints_name_is_read_only_where_it_is_certain(sql: str, changes: list[tuple[str, str | None]]) -> None:
    assert savepoint_changes(sql) == changes
