"""The protected items: rows in databases, each locked through one store, and the tables that record their changes."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Traits:
    """What a store promises, according to docs/stores.md."""

    databases: tuple[str, ...]
    """The databases of its items."""
    row_database: str = "postgresql"
    """The database of one more item, whose row carries its own fence; empty if there is none."""
    is_fair: bool = True
    has_shared: bool = True
    ends_with_connection: bool = False
    """Whether a lock is free as soon as its connection breaks, before its holder knows."""
    has_version: bool = False
    """Whether the row has a version, which every write checks, instead of a lock."""
    is_inside: bool = False
    """Whether the lock is part of the transaction, which begins first."""
    ttl: float = 1.5
    held_after_death: float = 2.5
    """Seconds within which a dead holder's lock is free by promise: ttl + 1 unless docs/stores.md says otherwise."""


_MIXED: Final = ("postgresql", "postgresql", "mariadb")
STORES: Final = {
    "redis": Traits(("postgresql", "postgresql", "postgresql")),
    "turned": Traits(("postgresql", "postgresql", "sqlite"), "sqlite"),
    "sentinel": Traits(_MIXED, "mariadb"),
    "cluster": Traits(_MIXED),
    "redlock": Traits(("postgresql", "postgresql", "sqlite"), "sqlite", is_fair=False, has_shared=False),
    "etcd": Traits(_MIXED, "mariadb", ttl=2.0, held_after_death=5.5),
    "zookeeper": Traits(_MIXED, held_after_death=5.0),
    "table": Traits(_MIXED, "mariadb", is_fair=False, has_shared=False),
    "session": Traits(_MIXED, ends_with_connection=True),
    "advisory": Traits(("postgresql", "postgresql"), "", ends_with_connection=True, is_inside=True),
    "version": Traits(("postgresql", "mariadb", "sqlite"), "", has_shared=False, has_version=True),
}
"""By the names with which workers configure them; `turned` is a Redis whose clock is stepped, `version` is no store."""

ZOOKEEPER_SESSION_S: Final = 4.0
FENCED: Final = "fenced.item"
"""The prefix of locks whose fence is the row: Django's label of the model, SQLAlchemy's schema and table."""


@dataclass(frozen=True, slots=True)
class Item:
    """One row, and its lock: `("item", key)` or, if the row carries its own fence, `(Fenced, key)`."""

    key: str
    store: str
    database: str
    is_fenced: bool = False
    """Whether its row carries the fence, as `FencedMixin` defines it."""

    @property
    def lock(self) -> str:
        """Return the name of its lock, which both integrations make of the class and the key."""
        return f"{FENCED if self.is_fenced else 'item'}:{self.key}"

    @property
    def traits(self) -> Traits:
        return STORES[self.store]


def items_of(store: str) -> list[Item]:
    traits = STORES[store]
    items = [Item(f"{store}-{place}", store, database) for place, database in enumerate(traits.databases)]
    return [*items, Item(f"{store}-row", store, traits.row_database, is_fenced=True)] if traits.row_database else items


def every_item(stores: list[str] | None = None) -> dict[str, Item]:
    return {item.key: item for store in stores or STORES for item in items_of(store)}


TABLES: Final = (
    """\
CREATE TABLE item (name VARCHAR(40) PRIMARY KEY, value INT NOT NULL, current INT NOT NULL, version BIGINT NOT NULL,
dlock_token BIGINT NOT NULL DEFAULT 0, dlock_holder VARCHAR(32) NOT NULL DEFAULT '')""",
    "CREATE TABLE orders (item VARCHAR(40), number INT, state VARCHAR(20) NOT NULL, PRIMARY KEY (item, number))",
    "CREATE TABLE event (item VARCHAR(40), number INT, what VARCHAR(20), section VARCHAR(60))",
    "CREATE TABLE note (section VARCHAR(60))",
    "CREATE TABLE journal (item VARCHAR(40), value INT, seen INT, section VARCHAR(60), token BIGINT, shared INT, fence BIGINT)",
)
"""`note` is for work in a second database; `journal` has a row for each committed change of an item: what the section
had seen, what it wrote, and its token."""
