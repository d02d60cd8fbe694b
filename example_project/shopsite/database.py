"""DATABASE_URL as Django's settings. Errors never repeat the URL: it may hold a password."""

from urllib.parse import parse_qsl, unquote, urlsplit

from django.core.exceptions import ImproperlyConfigured

ENGINES = {
    "postgres": "django.db.backends.postgresql",
    "postgresql": "django.db.backends.postgresql",
    "mysql": "django.db.backends.mysql",
    "mariadb": "django.db.backends.mysql",
    "sqlite": "django.db.backends.sqlite3",
}

# The same for every strategy. A transaction that may write asks for SQLite's write lock when it begins, and waits for
# it; by default SQLite asks at the first write and then answers "database is locked" at once to one that has read.
SQLITE = {
    "transaction_mode": "IMMEDIATE",
    "timeout": 30,
    "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL",
}
SERVER = {"connect_timeout": 10}


def database(url: str) -> dict[str, object]:
    """Read postgres://user:password@host:port/name?option=value, mysql://…, sqlite:////absolute/path or sqlite:///path."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or ""
    except ValueError:
        raise ImproperlyConfigured("DATABASE_URL is not a URL: percent-encode what is unusual in it") from None
    engine, name = ENGINES.get(parts.scheme), unquote(parts.path[1:])
    if engine is None:
        raise ImproperlyConfigured(f"DATABASE_URL must begin with one of {', '.join(f'{name}://' for name in ENGINES)}")
    if not name:
        raise ImproperlyConfigured("DATABASE_URL does not name a database after its last slash")
    return {
        "ENGINE": engine,
        "NAME": name,
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": host,
        "PORT": port,
        "OPTIONS": (SQLITE if parts.scheme == "sqlite" else SERVER) | dict(parse_qsl(parts.query)),
        "CONN_MAX_AGE": 60,
    }
