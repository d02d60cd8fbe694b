"""Random operations of three interleaved sessions, on every shape of class, against a dictionary that knows what must happen.

The model knows no version numbers. Every write gives a row a new stamp, an instance remembers the stamp of what was
read, and a write has to succeed if, and only if, the row still has it. `DLOCK_TEST_MODEL_EXAMPLES` sets the number of
examples, `DLOCK_TEST_MODEL_SEED` repeats a run.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar, Final

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from sqlalchemy import (
    BigInteger,
    Column,
    Delete,
    Engine,
    ForeignKey,
    Integer,
    String,
    Table,
    Update,
    create_engine,
    event,
    inspect,
    select,
    update,
)
from sqlalchemy.exc import ArgumentError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, load_only, mapped_column
from sqlalchemy.orm.exc import StaleDataError

from sqla_dlock.root_transaction import connections_in
from sqla_dlock.versions import StaleObject, VersionedMixin, delete_with_version, save_with_version, touch
from tests.sqla_dlock import conftest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

EXAMPLES: Final = int(os.environ.get("DLOCK_TEST_MODEL_EXAMPLES", "12"))
STEPS: Final = 30
SEED: Final = int(os.environ.get("DLOCK_TEST_MODEL_SEED") or 3)
KEYS: Final = (1, 2)
SESSIONS: Final = (0, 1, 2)
PLAN: Final = st.tuples(
    st.sampled_from(SESSIONS),
    st.sampled_from(KEYS),
    st.sampled_from(["load", "shown late", "expire", "refresh", "assign"]),
    st.sampled_from(["nothing", "saved", "made anew"]),
    st.sampled_from(["save", "flush", "delete", "delete_by_flush"]),
)
"""A session, the row that it reads, how, what another session does to it meanwhile, and how the first writes it."""


class Base(DeclarativeBase):
    pass


conftest.METADATA.append(Base.metadata)


class Plain(VersionedMixin, Base):
    __tablename__ = "model_plain"
    id: Mapped[int] = mapped_column(primary_key=True)
    title: Mapped[str] = mapped_column(String(40), default="")
    note: Mapped[str] = mapped_column(String(40), default="")


class Single(VersionedMixin, Base):
    __tablename__ = "model_single"
    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(String(10))
    title: Mapped[str] = mapped_column(String(40), default="")
    __mapper_args__: ClassVar[Any] = {"polymorphic_on": "kind", "polymorphic_identity": "root"}


class SingleChild(Single):
    note: Mapped[str | None] = mapped_column(String(40), default="")
    __mapper_args__: ClassVar[Any] = {"polymorphic_identity": "child"}


class Joined(VersionedMixin, Base):
    __tablename__ = "model_joined"
    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(String(10))
    title: Mapped[str] = mapped_column(String(40), default="")
    __mapper_args__: ClassVar[Any] = {"polymorphic_on": "kind", "polymorphic_identity": "root"}


class JoinedChild(Joined):
    __tablename__ = "model_joined_child"
    id: Mapped[int] = mapped_column(ForeignKey("model_joined.id"), primary_key=True)
    note: Mapped[str] = mapped_column(String(40), default="")
    __mapper_args__: ClassVar[Any] = {"polymorphic_identity": "child"}


class Person(Base):
    __tablename__ = "model_person"
    id: Mapped[int] = mapped_column(primary_key=True)
    title: Mapped[str] = mapped_column(String(40), default="")


class Member(VersionedMixin, Person):
    """It has a version, and its parent has none."""

    __tablename__ = "model_member"
    id: Mapped[int] = mapped_column(ForeignKey("model_person.id"), primary_key=True)
    note: Mapped[str] = mapped_column(String(40), default="")


class Composite(VersionedMixin, Base):
    __tablename__ = "model_composite"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    part: Mapped[str] = mapped_column(String(10), primary_key=True, default="x")
    title: Mapped[str] = mapped_column(String(40), default="")
    note: Mapped[str] = mapped_column(String(40), default="")
    version: Mapped[int] = mapped_column("row_version", BigInteger)


class Imperative(VersionedMixin):
    pass


_imperative = Table(
    "model_imperative",
    Base.metadata,
    Column("id", Integer, primary_key=True),
    Column("title", String(40), default=""),
    Column("note", String(40), default=""),
    Column("revision", BigInteger),
)
Base.registry.map_imperatively(
    Imperative, _imperative, properties={"version": _imperative.c.revision}, version_id_col=_imperative.c.revision
)

SHAPES: Final[dict[str, type]] = {
    each.__name__: each for each in (Plain, SingleChild, JoinedChild, Member, Composite, Imperative)
}


class Doc(Base):
    __tablename__ = "model_doc"
    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(String(10))
    title: Mapped[str] = mapped_column(String(40), default="")
    note: Mapped[str] = mapped_column(String(40), default="")
    __mapper_args__: ClassVar[Any] = {"polymorphic_on": "kind", "polymorphic_identity": "root"}


with suppress(ArgumentError):  # a flush would not check it: it is refused, or else has to hold

    class Contract(VersionedMixin, Doc):
        __mapper_args__: ClassVar[Any] = {"polymorphic_identity": "contract"}

    SHAPES["Contract"] = Contract


class Routing(Session):
    """Reads from a replica, as in SQLAlchemy's documentation."""

    leader: Engine
    follower: Engine

    def get_bind(self, mapper: Any = None, clause: Any = None) -> Any:  # type: ignore[override]
        return self.leader if self._flushing or isinstance(clause, Update | Delete) else self.follower


@dataclass
class Row:
    stamp: int
    version: int
    values: dict[str, str]


Rows = dict[int, Row | None]


@dataclass
class Seen:
    """What a session has in memory of a row."""

    instance: Any
    stamp: int | None
    """None: it has expired, and is read when it is needed."""
    changes: dict[str, str] = field(default_factory=dict)
    expected: int | None = None
    is_touched: bool = False
    is_unchecked: bool = False
    """Its version was not read with the rest."""

    def is_dirty(self) -> bool:
        return bool(self.changes) or self.is_touched or self.is_wrong()

    def is_wrong(self) -> bool:
        return self.expected is not None and self.expected != self.stamp


@dataclass
class Party:
    session: Session
    seen: dict[int, Seen] = field(default_factory=dict)
    written: Rows = field(default_factory=dict)
    """The rows that the open transaction has written."""
    locked: set[int] = field(default_factory=set)
    savepoints: list[tuple[Any, Rows]] = field(default_factory=list)

    def is_dirty(self) -> bool:
        return any(each.is_dirty() for each in self.seen.values())


class Machine(RuleBasedStateMachine):
    kind: ClassVar[Any]
    engine: ClassVar[Engine]
    follower: ClassVar[Engine | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.numbers = count(1)
        self.rows: Rows = {}
        self.replica: Rows = {}
        self.history: dict[int, list[tuple[int, int]]] = {key: [] for key in KEYS}
        """The stamps that were committed, with their version numbers: what pages in browsers show."""
        for engine in filter(None, (self.engine, self.follower)):
            with engine.begin() as connection:
                for table in reversed(inspect(self.kind).tables):
                    connection.execute(table.delete())
        self.parties = [Party(self.new_session()) for _ in SESSIONS]
        self.is_fast = len(inspect(self.kind).tables) == 1

    def new_session(self) -> Session:
        if self.follower is None:
            return Session(self.engine, autoflush=False, expire_on_commit=False)
        session = Routing(autoflush=False, expire_on_commit=False)
        session.leader, session.follower = self.engine, self.follower
        return session

    def teardown(self) -> None:
        for party in self.parties:
            party.session.close()

    # what the model knows

    def visible(self, party: Party, key: int) -> Row | None:
        return party.written[key] if key in party.written else self.rows.get(key)

    def readable(self, party: Party, key: int) -> Row | None:
        return self.replica.get(key) if self.follower is not None else self.visible(party, key)

    def may(self, party: Party, keys: Iterable[int] = ()) -> bool:
        """Return whether a session can go on without a wait; on SQLite, where transactions take turns, end others."""
        others = [each for each in SESSIONS if self.parties[each] is not party]
        if self.engine.dialect.name == "sqlite":
            for each in others:
                if self.holds(self.parties[each]):
                    self.finish(self.parties[each])
                if self.holds(self.parties[each]):  # in a savepoint
                    self.rollback(each)
        return not any(self.parties[each].locked.intersection(keys) for each in others)

    def holds(self, party: Party) -> bool:
        """Return whether the session has begun a transaction in the database."""
        transaction = party.session.get_transaction()
        return transaction is not None and any(each.engine is self.engine for each in connections_in(transaction))

    def writes(self, party: Party, *more: int) -> list[int]:
        return sorted({key for key, seen in party.seen.items() if seen.is_dirty()} | {*more})

    def errors(self, party: Party, keys: list[int], read: Callable[[Party, int], Row | None]) -> set[type[Exception]]:
        """Return the errors with which a write of these must fail."""
        found: set[type[Exception]] = set()
        for key in keys:
            seen, row = party.seen[key], self.visible(party, key)
            if seen.is_unchecked:
                found |= {ValueError} if read(party, key) else {ValueError, StaleObject}
                continue
            if seen.stamp is None:
                was = read(party, key)
                seen_stamp = was.stamp if was else None
            else:
                seen_stamp = seen.stamp
            if seen.is_wrong() or row is None or seen_stamp != row.stamp:
                found.add(StaleObject)
        return found

    def wrote(self, party: Party, key: int) -> None:
        """Record that the instance was written: the row gets a new stamp, and its version must be one higher."""
        seen, row = party.seen[key], self.visible(party, key)
        assert row is not None
        number = seen.instance.version
        assert number == row.version + 1
        party.written[key] = Row(next(self.numbers), number, {**row.values, **seen.changes})
        party.seen[key] = Seen(seen.instance, party.written[key].stamp)

    def rolled_back(self, party: Party) -> None:
        party.written, party.savepoints = {}, []
        party.locked.clear()
        known = party.session.identity_map.values()
        party.seen = {_key(each): Seen(each, None) for each in known}

    def attempt(self, party: Party, keys: list[int], work: Callable[[], object], *, ends: bool) -> bool:
        """Do work that writes these, and return whether it succeeded, if it must; `ends`: an error ends the transaction."""
        read = self.visible if ends else self.readable
        errors = self.errors(party, keys, read)
        party.locked.update(keys)
        try:
            work()
        except (StaleDataError, ValueError) as error:  # SQLAlchemy's own for a row that is gone from a parent's table
            if (StaleObject if isinstance(error, StaleDataError) else ValueError) not in errors:
                raise AssertionError(f"refused without a reason: {error}") from error
            if ends:
                party.session.rollback()
                self.rolled_back(party)
            for key, seen in party.seen.items():  # what had expired may have been read for the check
                if seen.stamp is None and "version" in _loaded(seen.instance):
                    row = read(party, key)
                    seen.stamp = row.stamp if row else None
            return False
        assert not errors, f"went well, but {errors} was due"
        return True

    @initialize(plans=st.lists(PLAN, min_size=8, max_size=8))
    def begin(self, plans: list[tuple[Any, ...]]) -> None:
        """Let every session read all rows; then follow the plans, which chance would try too rarely."""
        for key in KEYS:
            self.insert(0, key)
        self.commit(0)
        self.replicate()
        for who in SESSIONS:
            for key in KEYS:
                self.load(who, key)
            self.commit(who)
        for plan in plans:
            self.read_and_write(*plan)

    # reading

    @rule(who=st.sampled_from(SESSIONS), key=st.sampled_from(KEYS))
    def load(self, who: int, key: int) -> None:
        party = self.parties[who]
        if not self.may(party):
            return
        row = self.readable(party, key)
        query = select(self.kind).where(self.kind.id == key).execution_options(populate_existing=True)
        found = party.session.scalars(query).one_or_none()
        assert (found is None) == (row is None)
        if found is not None:
            assert (found.version, found.title, found.note) == (row.version, row.values["title"], row.values["note"])
            party.seen[key] = Seen(found, row.stamp)

    @rule(who=st.sampled_from(SESSIONS))
    def query(self, who: int) -> None:
        party = self.parties[who]
        if not self.may(party):
            return
        party.session.scalars(select(self.kind)).all()
        for key, seen in party.seen.items():
            if seen.stamp is None and not seen.is_unchecked and (row := self.readable(party, key)):
                seen.stamp = row.stamp

    @rule(who=st.sampled_from(SESSIONS), key=st.sampled_from(KEYS), is_shown=st.booleans())
    def load_without_version(self, who: int, key: int, is_shown: bool) -> None:
        party = self.parties[who]
        if not self.may(party) or self.readable(party, key) is None:
            return
        if key in party.seen:
            party.session.expunge(party.seen.pop(key).instance)
        for each in list(party.session.identity_map.values()):
            if _key(each) == key:
                party.session.expunge(each)
        query = select(self.kind).where(self.kind.id == key).options(load_only(self.kind.title, self.kind.note))
        found = party.session.scalars(query).one()
        found.was_partial = True  # SQLAlchemy keeps load_only() with the instance, and refresh() applies it again
        party.seen[key] = Seen(found, None, is_unchecked=True)
        if is_shown:
            self.show_version(who, key)

    @rule(who=st.sampled_from(SESSIONS), key=st.sampled_from(KEYS))
    def show_version(self, who: int, key: int) -> None:
        """Read the version, as a template or a serializer does."""
        party = self.parties[who]
        if not self.may(party) or (seen := party.seen.get(key)) is None or (row := self.readable(party, key)) is None:
            return
        assert seen.instance.version is not None
        if seen.stamp is None and not seen.is_unchecked:
            seen.stamp = row.stamp

    @rule(who=st.sampled_from(SESSIONS), key=st.sampled_from(KEYS))
    def expire(self, who: int, key: int) -> None:
        party = self.parties[who]
        if seen := party.seen.get(key):
            party.session.expire(seen.instance)
            party.seen[key] = Seen(seen.instance, None)

    @rule(who=st.sampled_from(SESSIONS), key=st.sampled_from(KEYS))
    def refresh(self, who: int, key: int) -> None:
        party = self.parties[who]
        if not self.may(party):
            return
        seen, row = party.seen.get(key), self.readable(party, key)
        if seen and row:
            party.session.refresh(seen.instance)
            is_unchecked = hasattr(seen.instance, "was_partial")
            party.seen[key] = Seen(seen.instance, None if is_unchecked else row.stamp, is_unchecked=is_unchecked)

    # changing instances

    @rule(who=st.sampled_from(SESSIONS), key=st.sampled_from(KEYS), name=st.sampled_from(["title", "note"]))
    def edit(self, who: int, key: int, name: str) -> None:
        if seen := self.parties[who].seen.get(key):
            value = f"{name} {next(self.numbers)}"
            setattr(seen.instance, name, value)
            seen.changes[name] = value

    @rule(who=st.sampled_from(SESSIONS), key=st.sampled_from(KEYS), page=st.integers(0, 3))
    def assign_version(self, who: int, key: int, page: int) -> None:
        """Assign the version that a page has shown, as a payload does."""
        seen = self.parties[who].seen.get(key)
        if seen and seen.stamp is not None and not seen.is_unchecked and self.history[key]:
            seen.expected, number = self.history[key][-1 - page % len(self.history[key])]
            seen.instance.version = number

    @rule(who=st.sampled_from(SESSIONS), key=st.sampled_from(KEYS))
    def touch(self, who: int, key: int) -> None:
        seen = self.parties[who].seen.get(key)
        if seen and seen.stamp is not None and not seen.is_unchecked:
            touch(self.parties[who].session, seen.instance)
            seen.is_touched = True

    @rule(who=st.sampled_from(SESSIONS), key=st.sampled_from(KEYS), page=st.integers(0, 3))
    def merge(self, who: int, key: int, page: int) -> None:
        party = self.parties[who]
        if not self.may(party):
            return
        seen, row = party.seen.get(key), self.readable(party, key)
        if not self.history[key] or row is None:
            return
        if seen is None or seen.stamp is None:
            self.load(who, key)
            seen = party.seen[key]
        if seen.is_unchecked or seen.is_dirty() or seen.expected is not None:
            return
        stamp, number = self.history[key][-1 - page % len(self.history[key])]
        value = f"merged {next(self.numbers)}"
        try:
            merged = party.session.merge(_new(self.kind, key, title=value, version=number))
        except StaleDataError:
            assert stamp != seen.stamp
        else:
            assert stamp == seen.stamp
            assert merged is seen.instance
            seen.changes["title"] = value

    # writing

    @rule(who=st.sampled_from(SESSIONS), key=st.sampled_from(KEYS), is_changed=st.booleans())
    def save(self, who: int, key: int, is_changed: bool) -> None:
        party = self.parties[who]
        if not (seen := party.seen.get(key)):
            return
        if is_changed:
            self.edit(who, key, "title")
        if not self.may(party, keys := [key] if self.is_fast else self.writes(party, key)):
            return
        if not seen.is_dirty():
            keys = [key]
            if not seen.is_unchecked:
                if seen.stamp is not None:
                    save_with_version(party.session, seen.instance)  # sends nothing
                return
        if self.attempt(party, keys, lambda: save_with_version(party.session, seen.instance), ends=False):
            for each in keys:
                self.wrote(party, each)

    @rule(who=st.sampled_from(SESSIONS), key=st.sampled_from(KEYS), is_changed=st.booleans())
    def flush(self, who: int, key: int, is_changed: bool) -> None:
        party = self.parties[who]
        if is_changed:
            self.edit(who, key, "note")
        if self.may(party, keys := self.writes(party)) and self.attempt(party, keys, party.session.flush, ends=True):
            for key in keys:
                self.wrote(party, key)

    @rule(who=st.sampled_from(SESSIONS), key=st.sampled_from(KEYS))
    def delete(self, who: int, key: int) -> None:
        party = self.parties[who]
        seen = party.seen.get(key)
        if not seen or not self.may(party, keys := self.writes(party, key)):
            return
        if self.attempt(party, keys, lambda: delete_with_version(party.session, seen.instance), ends=False):
            self.deleted(party, key, keys)

    @rule(who=st.sampled_from(SESSIONS), key=st.sampled_from(KEYS))
    def delete_by_flush(self, who: int, key: int) -> None:
        party = self.parties[who]
        seen = party.seen.get(key)
        if not seen or seen.stamp is None or not self.may(party, keys := self.writes(party, key)):
            return
        party.session.delete(seen.instance)
        if self.attempt(party, keys, party.session.flush, ends=True):
            self.deleted(party, key, keys)

    def deleted(self, party: Party, key: int, keys: list[int]) -> None:
        for other in keys:
            if other != key:
                self.wrote(party, other)
        party.written[key] = None
        del party.seen[key]

    @rule(who=st.sampled_from(SESSIONS), key=st.sampled_from(KEYS))
    def insert(self, who: int, key: int) -> None:
        party = self.parties[who]
        if not self.may(party, [key]) or self.visible(party, key) is not None or party.is_dirty():
            return
        for each in list(party.session.identity_map.values()):
            if _key(each) == key:
                party.session.expunge(each)
        values = {name: f"{name} {next(self.numbers)}" for name in ("title", "note")}
        party.session.add(new := _new(self.kind, key, **values))
        party.locked.add(key)
        party.session.flush()
        party.written[key] = Row(next(self.numbers), new.version, values)
        party.seen[key] = Seen(new, party.written[key].stamp)

    @rule(who=st.sampled_from(SESSIONS), key=st.sampled_from(KEYS))
    def replace(self, who: int, key: int) -> None:
        """Delete and insert in one flush, which SQLAlchemy turns into an UPDATE."""
        party = self.parties[who]
        seen = party.seen.get(key)
        if not seen or seen.stamp is None or party.is_dirty() or not self.may(party, [key]) or seen.is_unchecked:
            return
        values = {name: f"{name} {next(self.numbers)}" for name in ("title", "note")}
        party.session.delete(seen.instance)
        party.session.add(new := _new(self.kind, key, **values, version=7))
        if self.attempt(party, [key], party.session.flush, ends=True):
            party.seen[key] = Seen(new, None, values)
            self.wrote(party, key)

    @rule(who=st.sampled_from(SESSIONS), key=st.sampled_from(KEYS))
    def update_statement(self, who: int, key: int) -> None:
        party = self.parties[who]
        if not self.may(party, [key]) or (row := self.visible(party, key)) is None:
            return
        owner = inspect(self.kind).version_id_col.table
        kind = next(each.class_ for each in inspect(self.kind).iterate_to_root() if each.local_table is owner)
        name = "title" if "title" in owner.columns else "note"
        value = f"{name} {next(self.numbers)}"
        statement = update(kind).where(kind.id == key).values({name: value})
        party.session.execute(statement, execution_options={"synchronize_session": False})
        party.locked.add(key)
        party.written[key] = Row(next(self.numbers), row.version + 1, {**row.values, name: value})

    # what chance would try too rarely

    def read_and_write(self, who: int, key: int, read: str, between: str, write: str) -> None:
        """Let one session read and then write a row, which another one may write and commit in between."""
        self.commit(who)
        if self.rows.get(key) is None:
            self.insert(who, key)
            self.commit(who)
        self.replicate()
        if read == "shown late":
            self.load_without_version(who, key, is_shown=True)
        elif read == "expire":
            self.expire(who, key)
        elif read == "refresh":
            self.refresh(who, key)
        else:
            self.load(who, key)
        if read == "assign":
            self.assign_version(who, key, page=1)
        if between != "nothing":
            self.commit(who)
            self.write_meanwhile((who + 1) % len(SESSIONS), key, is_new=between == "made anew")
        if write.startswith("delete"):
            getattr(self, write)(who, key)
        else:
            getattr(self, write)(who, key, is_changed=True)

    def write_meanwhile(self, who: int, key: int, *, is_new: bool) -> None:
        self.rollback(who)
        self.load(who, key)
        if self.rows.get(key) is None:
            self.insert(who, key)
        if is_new:
            self.delete(who, key)
            self.insert(who, key)
        else:
            self.save(who, key, is_changed=True)
        self.commit(who)

    # transactions

    @rule(who=st.sampled_from(SESSIONS))
    def commit(self, who: int) -> None:
        party = self.parties[who]
        if self.may(party, self.writes(party)):
            self.finish(party)

    def finish(self, party: Party) -> None:
        keys = self.writes(party)
        while party.savepoints:
            if keys:
                return
            party.savepoints.pop()[0].commit()
        if self.attempt(party, keys, party.session.commit, ends=True):
            for key in keys:
                self.wrote(party, key)
            self.rows |= party.written
            for key, row in party.written.items():
                if row:
                    self.history[key].append((row.stamp, row.version))
            party.written = {}
            party.locked.clear()
            self.compare()

    @rule(who=st.sampled_from(SESSIONS))
    def rollback(self, who: int) -> None:
        party = self.parties[who]
        if not party.session.in_transaction():  # then it would do nothing, and expire nothing
            return
        while party.savepoints:
            party.savepoints.pop()[0].rollback()
        party.session.rollback()
        self.rolled_back(party)
        if party.session.in_transaction():
            party.session.rollback()

    @rule(who=st.sampled_from(SESSIONS))
    def savepoint(self, who: int) -> None:
        party = self.parties[who]
        if self.may(party) and not party.is_dirty() and len(party.savepoints) < 2:
            party.savepoints.append((party.session.begin_nested(), deepcopy(party.written)))

    @rule(who=st.sampled_from(SESSIONS), is_kept=st.booleans())
    def end_savepoint(self, who: int, is_kept: bool) -> None:
        party = self.parties[who]
        if not party.savepoints or (is_kept and (party.is_dirty() or not self.may(party))):
            return
        savepoint, before = party.savepoints.pop()
        if is_kept:
            savepoint.commit()
            return
        undone = {row.stamp for key, row in party.written.items() if row and before.get(key) is not row}
        savepoint.rollback()
        party.written = before
        present = {_key(each): each for each in party.session.identity_map.values()}
        old, party.seen = party.seen, {}
        for key, instance in present.items():
            seen = old.get(key)
            if seen is None or seen.instance is not instance or "version" not in _loaded(instance):
                unchecked = seen is not None and seen.instance is instance and seen.is_unchecked
                party.seen[key] = Seen(instance, None, is_unchecked=unchecked)
            else:
                assert seen.stamp not in undone - {row.stamp for row in before.values() if row}
                party.seen[key] = seen

    @rule()
    def replicate(self) -> None:
        is_locked = self.engine.dialect.name == "sqlite" and any(map(self.holds, self.parties))
        if self.follower is None or is_locked:
            return
        with self.engine.connect() as source, self.follower.begin() as target:
            for table in inspect(self.kind).tables:
                target.execute(table.delete())
                if found := [dict(row._mapping) for row in source.execute(select(table))]:
                    target.execute(table.insert(), found)
        self.replica = {**self.rows}

    def compare(self) -> None:
        """Check that the database has what the model says."""
        with Session(self.engine) as session:
            found = {each.id: (each.version, each.title, each.note) for each in session.scalars(select(self.kind))}
        assert found == {
            key: (row.version, row.values["title"], row.values["note"]) for key, row in self.rows.items() if row
        }


def _new(kind: Any, key: int, **values: Any) -> Any:
    """Make an instance of any class, to which a version may be assigned."""
    instance = kind()
    for name, value in {"id": key, **({"part": "x"} if kind is Composite else {}), **values}.items():
        setattr(instance, name, value)
    return instance


def _key(instance: Any) -> int:
    """Return the key of an instance, also when that has expired."""
    return int(inspect(instance).identity[0])


def _loaded(instance: Any) -> dict[str, Any]:
    return dict(inspect(instance).dict)


@pytest.fixture(autouse=True)
def rows_begin_at_1() -> None:
    """Override the fixture of this name: here versions begin by the clock."""


def run(kind: type, engine: Engine, follower: Engine | None = None) -> None:
    machine = type(f"{kind.__name__}Machine", (Machine,), {"kind": kind, "engine": engine, "follower": follower})
    sys.stdout.write(f"DLOCK_TEST_MODEL_SEED={SEED}\n")
    limits = settings(
        max_examples=EXAMPLES,
        stateful_step_count=STEPS,
        deadline=None,
        database=None,
        phases=[Phase.generate],  # what fails is short enough, and shrinking it may take minutes of waits
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(seed(SEED)(machine), settings=limits)


@pytest.fixture(params=["sqlite", "postgresql"])
def engine(request: pytest.FixtureRequest, make_engine: Callable[..., Engine]) -> Engine:
    """An engine that waits only shortly: the model avoids waits, and a mistake in it has to show."""
    if request.param == "postgresql":
        return make_engine("postgresql", connect_args={"options": "-clock_timeout=1000"})
    engine = make_engine("sqlite")
    event.listen(engine, "connect", lambda connection, _: connection.execute("PRAGMA busy_timeout=1000").close())
    return engine


@pytest.mark.filterwarnings(
    "ignore:DELETE statement on table 'model_(joined_child|member)'"
)  # then the parent's is refused
@pytest.mark.parametrize("shape", SHAPES)
def test_no_write_passes_over_what_its_instance_has_not_seen(engine, shape):
    run(SHAPES[shape], engine)


@pytest.mark.filterwarnings("ignore:DELETE statement on table 'model_(joined_child|member)'")
@pytest.mark.parametrize("shape", ["Plain", "JoinedChild"])
def test_no_write_passes_over_what_its_instance_has_not_seen_with_a_replica(engine, shape, tmp_path: Path):
    follower = create_engine(f"sqlite:///{tmp_path}/follower", isolation_level="AUTOCOMMIT")
    event.listen(follower, "connect", lambda connection, _: connection.execute("PRAGMA journal_mode=WAL").close())
    Base.metadata.create_all(follower)
    run(SHAPES[shape], engine, follower)
    follower.dispose()
