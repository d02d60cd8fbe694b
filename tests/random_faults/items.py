"""What is protected: items in databases, each locked through one store, and the tables that tell what became of them."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Traits:
    """What a store promises, as docs/stores.md says it."""

    databases: tuple[str, ...]
    """Where its items are."""
    is_fair: bool = True
    has_shared: bool = True
    ends_with_connection: bool = False
    """Whether a lock is free as soon as its connection breaks, before its holder knows."""
    has_version: bool = False
    """Whether no lock is taken: the row has a version, which every write checks."""
    is_inside: bool = False
    """Whether the lock is a part of the transaction, which begins before it."""
    ttl: float = 1.5
    held_after_death: float = 2.5
    """Seconds, by promise, after which a dead holder is followed: ttl + 1 unless the page on stores says otherwise."""


_MIXED: Final = ("postgresql", "postgresql", "mariadb")
STORES: Final = {
    "redis": Traits(("postgresql", "postgresql", "postgresql")),
    "turned": Traits(("postgresql", "postgresql", "sqlite")),
    "sentinel": Traits(_MIXED),
    "cluster": Traits(_MIXED),
    "redlock": Traits(("postgresql", "postgresql", "sqlite"), is_fair=False, has_shared=False),
    "etcd": Traits(_MIXED, ttl=2.0, held_after_death=5.5),
    "zookeeper": Traits(_MIXED, held_after_death=5.0),
    "table": Traits(_MIXED, is_fair=False, has_shared=False),
    "session": Traits(_MIXED, ends_with_connection=True),
    "advisory": Traits(("postgresql", "postgresql"), ends_with_connection=True, is_inside=True),
    "version": Traits(("postgresql", "mariadb", "sqlite"), has_shared=False, has_version=True),
}
"""By the names under which the workers configure them; `turned` is a Redis whose clock is stepped, `version` is no store at all."""

ZOOKEEPER_SESSION_S: Final = 4.0


@dataclass(frozen=True, slots=True)
class Item:
    """One row, and the lock `("item", key)` that protects it."""

    key: str
    store: str
    database: str

    @property
    def traits(self) -> Traits:
        return STORES[self.store]


def items_of(store: str) -> list[Item]:
    return [Item(f"{store}-{place}", store, database) for place, database in enumerate(STORES[store].databases)]


def every_item(stores: list[str] | None = None) -> dict[str, Item]:
    return {item.key: item for store in stores or STORES for item in items_of(store)}


TABLES: Final = (
    "CREATE TABLE item (name VARCHAR(40) PRIMARY KEY, value INT NOT NULL, current INT NOT NULL, version BIGINT NOT NULL)",
    "CREATE TABLE orders (item VARCHAR(40), number INT, state VARCHAR(20) NOT NULL, PRIMARY KEY (item, number))",
    "CREATE TABLE event (item VARCHAR(40), number INT, what VARCHAR(20), section VARCHAR(60))",
    "CREATE TABLE journal (item VARCHAR(40), value INT, seen INT, section VARCHAR(60), token BIGINT, shared INT)",
)
"""`journal` has a row for each committed change of an item: what the section had seen, what it wrote, and its token."""
