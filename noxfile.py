"""The whole suite on each Python, Django and SQLAlchemy that we promise: `nox`, or one of them: `nox -s tests-3.12`.

What stands after `--` replaces the whole suite in six processes: `nox -s lowest -- tests/core -k name`. Servers that
are missing are skipped with their reason; `make test` installs them on Debian.
"""

import nox

nox.options.default_venv_backend = "venv"

WHOLE_SUITE = ("--numprocesses", "6", "--dist", "loadfile", "--no-loadscope-reorder")

FRAMEWORKS_OF_PYTHON = {
    "3.11": ("django~=5.2.0", "sqlalchemy~=2.0.51"),
    "3.12": ("django~=6.0.0", "sqlalchemy~=2.1.0"),
    "3.13": ("django~=6.1.0", "sqlalchemy~=2.1.0"),
}


@nox.session(python=list(FRAMEWORKS_OF_PYTHON))
def tests(session: nox.Session) -> None:
    """The newest of everything but for Django and SQLAlchemy, which go with the Python.

    On 3.12, Django uses psycopg2.
    """
    frameworks = FRAMEWORKS_OF_PYTHON[str(session.python)]
    session.install("--upgrade", "pip>=25.1")
    session.install("--editable", ".", "--group", "test", "--group", "mariadb", *frameworks)
    driver = {"DLOCK_TEST_DJANGO_PSYCOPG2": "1"} if session.python == "3.12" else {}
    session.run("python", "-m", "pytest", *(session.posargs or WHOLE_SUITE), env=driver)


@nox.session(python="3.11", venv_backend="uv")
def lowest(session: nox.Session) -> None:
    """The lowest version of each dependency that pyproject.toml names; needs uv.

    The extras are named here: what only a group's `dlock-orm[django]` asks for counts as indirect, and comes new.
    """
    groups = ("--group", "pyproject.toml:test", "--group", "pyproject.toml:mariadb")
    session.run_install("uv", "pip", "install", "--resolution", "lowest-direct", "--editable", ".[all]", *groups)
    session.run("python", "-m", "pytest", *(session.posargs or WHOLE_SUITE))
