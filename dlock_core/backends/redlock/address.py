"""Read redlock:// URLs into the clients of their nodes; no error shows a password."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from dlock_core.backends.redis.clients import PORT, of_url
from dlock_core.backends.redis.hosts import split

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["check", "read"]

_BAD: Final = (
    "bad Redlock URL: expected redlock://[user:password@]host:port,host:port,host:port/db, one user and password for "
    "all nodes, with every : / ? # @ , of them percent-encoded"
)


def read(url: str, *, tls: bool) -> list[Any]:
    """Take a URL apart; raises ValueError."""
    user, nodes, database, options = split(url, port=PORT, path=r"(?:/\d*)?", bad=_BAD)
    scheme = "rediss" if tls else "redis"
    return [of_url(f"{scheme}://{user}{node}{database}{options}") for node in nodes]


def check(titles: Sequence[str]) -> None:
    """Raise ValueError unless these nodes can decide by majority."""
    if len(set(titles)) < len(titles):
        twice = next(one for one in titles if titles.count(one) > 1)
        raise ValueError(f"Redlock needs independent nodes, but {twice} is named twice")
    if len(titles) < 3 or len(titles) % 2 == 0:
        raise ValueError(
            f"Redlock needs an odd number of nodes, at least 3, not {len(titles)}: an even number survives no more "
            "failures than one node less"
        )
