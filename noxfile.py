"""The tests on each pair of Python and Django that we promise: `nox`, or one of them: `nox -s tests-3.12`."""

import nox

nox.options.default_venv_backend = "venv"

DJANGO_OF_PYTHON = {"3.11": "5.2", "3.12": "6.0", "3.13": "6.1"}


@nox.session(python=list(DJANGO_OF_PYTHON))
def tests(session: nox.Session) -> None:
    """Servers that are missing are skipped with their reason; `make test` installs them on Debian."""
    django = DJANGO_OF_PYTHON[str(session.python)]
    session.install("--upgrade", "pip>=25.1")
    session.install("--editable", ".", "--group", "test", "--group", "mariadb", f"django~={django}.0")
    session.run("python", "-m", "pytest", *session.posargs)
