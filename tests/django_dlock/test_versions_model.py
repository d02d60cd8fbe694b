"""Versions against a dictionary that knows what must happen: random operations of sessions whose transactions overlap.

Every write of a row gives it a new state in the dictionary. An instance may be written exactly when the row has the
state that the instance was read in, as far as the session can see; else the write is refused, and changes nothing.
Sessions are database aliases on one thread: what would wait for another one's lock is refused at once.

DLOCK_MODEL_EXAMPLES=2000 runs it for longer, and with new examples each time.
"""

import os
import uuid
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
from django.db import IntegrityError, OperationalError, connections
from django.db.transaction import atomic
from django.test import override_settings
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from django_dlock.errors import StaleObject
from tests.testapp.models import Article, ArticleProxy, Code, Job, Member, Shop, Team

EXAMPLES = int(os.environ.get("DLOCK_MODEL_EXAMPLES", "0"))
SETTINGS = settings(
    max_examples=EXAMPLES or 12,
    stateful_step_count=30,
    derandomize=not EXAMPLES,
    database=None,
    deadline=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)
PICK = st.integers(0, 7)
SESSION = st.sampled_from([0, 1])


@dataclass(frozen=True)
class Shape:
    """A model, the names of a text and a number field, and how its rows are found."""

    model: Any
    text: str
    number: str | None
    manager: str = "objects"
    key: Callable[[int], Any] = lambda number: number


SHAPES = {
    "plain": Shape(Article, "title", "reads"),
    "proxy": Shape(ArticleProxy, "title", "reads"),
    "version of the parent": Shape(Shop, "name", "owner"),
    "version of the child": Shape(Member, "name", "grade"),
    "manager that joins": Shape(Job, "title", "reads", "active", lambda number: uuid.UUID(int=number)),
    "natural key": Shape(Code, "title", None, key=lambda number: f"k{number}"),
}


class Sessions:
    """A router that writes to the session that is at work, and reads from a replica."""

    at_work = replica = ""

    def db_for_read(self, model: Any, **hints: Any) -> str:
        return self.replica

    def db_for_write(self, model: Any, **hints: Any) -> str:
        return self.at_work

    def allow_relation(self, *_: Any, **__: Any) -> bool:
        return True


@dataclass(eq=False)
class Held:
    """An instance, and the state of the row that it was read in; None: nothing may be written with it."""

    obj: Any
    key: Any
    state: int | None


Row = tuple[int, dict[str, Any]] | None


@dataclass(eq=False)
class Block:
    """What an atomic block has done, until it is known to last."""

    manager: Any
    rows: dict[Any, Row] = field(default_factory=dict)
    states: set[int] = field(default_factory=set)
    before: dict[Held, int | None] = field(default_factory=dict)


class RolledBack(Exception):
    """Ends a transaction."""


NUMBERS = count(1)


class Versions(RuleBasedStateMachine):
    shape: Shape
    aliases: list[str]
    replica = ""
    is_sqlite = False

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[Any, Row] = {}
        self.blocks: list[list[Block]] = [[] for _ in self.aliases]
        self.held: list[Held] = []
        self.last_key = 0

    @initialize(rows=st.integers(1, 2))
    def start(self, rows: int) -> None:
        Sessions.at_work, Sessions.replica = self.aliases[0], self.replica
        self.team = Team(pk=1) if self.shape.model is Job else None
        for table in {self.shape.model, Team}:
            table.objects.using(self.aliases[0]).all().delete()
        if self.team:
            self.team.save(using=self.aliases[0], force_insert=True)
        for _ in range(rows):
            self.create(session=0)

    # what the dictionary knows

    def seen(self, session: int, key: Any) -> Row:
        for block in reversed(self.blocks[session]):
            if key in block.rows:
                return block.rows[key]
        return self.rows.get(key)

    def is_taken(self, session: int, key: Any) -> bool:
        """Return whether another session has written the row in an open transaction; on SQLite, any open one counts."""
        others = [block for number, blocks in enumerate(self.blocks) if number != session for block in blocks]
        return any(self.is_sqlite or key in block.rows for block in others)

    def write(self, session: int, key: Any, values: dict[str, Any] | None, *held: Held) -> None:
        blocks, state = self.blocks[session], next(NUMBERS)
        for each in held:
            if blocks:
                blocks[-1].before.setdefault(each, each.state)
            each.state = state
        rows = blocks[-1].rows if blocks else self.rows
        rows[key] = None if values is None else (state, values)
        if blocks:
            blocks[-1].states.add(state)

    # how it is done

    def rows_of(self, session: int) -> Any:
        Sessions.at_work = self.aliases[session]
        return getattr(self.shape.model, self.shape.manager).using(self.aliases[session])

    def fields(self) -> list[str]:
        return [name for name in (self.shape.text, self.shape.number) if name]

    def values_of(self, obj: Any) -> dict[str, Any]:
        deferred = obj.get_deferred_fields()
        return {name: getattr(obj, name) for name in self.fields() if name not in deferred}

    def change(self, obj: Any, *names: str) -> None:
        for name in names or self.fields():
            if name not in obj.get_deferred_fields():
                setattr(obj, name, type(getattr(obj, name))(next(NUMBERS)))

    def is_as_known(self, session: int, key: Any) -> None:
        row = self.rows_of(session).filter(pk=key).values(*self.fields()).first()
        known = self.seen(session, key)
        assert row == (known and known[1])

    def do(self, session: int, held: list[Held], work: Callable[[], object]) -> bool:
        """Do a checked write, assert that it was done or refused as required, and return whether it was done."""
        Sessions.at_work = self.aliases[session]
        is_fresh = all((row := self.seen(session, each.key)) and row[0] == each.state for each in held)
        is_taken = any(self.is_taken(session, each.key) for each in held)
        if self.is_sqlite and is_taken:
            return False
        in_savepoint = is_taken and self.blocks[session]
        try:
            with atomic(self.aliases[session]) if in_savepoint else nullcontext():
                work()
        except ValueError:
            assert any(each.state is None for each in held)
        except StaleObject:
            assert not is_fresh, "refused without a reason"
        except OperationalError:
            assert is_taken, "waited for nobody"
        else:
            assert is_fresh, "accepted, and it was stale"
            assert not is_taken, "did not wait for another transaction"
            return True
        for each in held:
            self.is_as_known(session, each.key)
        return False

    def saved(self, session: int, held: Held, *names: str) -> None:
        row = self.seen(session, held.key)
        new = {name: value for name, value in self.values_of(held.obj).items() if not names or name in names}
        self.write(session, held.key, {**(row[1] if row else {}), **new}, held)
        self.is_as_known(session, held.key)
        in_database = self.rows_of(session).values_list("version", flat=True).get(pk=held.key)
        assert held.obj.version == in_database

    def pick(self, session: int, number: int) -> Held:
        """Take a fresh instance about every other time, or hardly anything would ever be written."""
        fresh = [each for each in self.held if (row := self.seen(session, each.key)) and row[0] == each.state]
        some = fresh if fresh and number % 2 else self.held
        return some[number // 2 % len(some)]

    def other_of(self, held: Held) -> Held | None:
        return next((each for each in self.held if each.key != held.key), None)

    # transactions

    @rule(session=SESSION)
    def begin(self, session: int) -> None:
        is_alone = not any(blocks for number, blocks in enumerate(self.blocks) if number != session)
        if len(self.blocks[session]) < 3 and (is_alone or not self.is_sqlite):
            self.blocks[session].append(Block(atomic(self.aliases[session])))
            self.blocks[session][-1].manager.__enter__()

    @precondition(lambda self: any(self.blocks))
    @rule(session=SESSION)
    def commit(self, session: int) -> None:
        if not self.blocks[session]:
            return
        block = self.blocks[session].pop()
        block.manager.__exit__(None, None, None)
        if self.blocks[session]:
            outer = self.blocks[session][-1]
            outer.rows.update(block.rows)
            outer.states |= block.states
            outer.before = {**block.before, **outer.before}
        else:
            self.rows.update(block.rows)

    @precondition(lambda self: any(self.blocks))
    @rule(session=SESSION)
    def roll_back(self, session: int) -> None:
        if not self.blocks[session]:
            return
        block = self.blocks[session].pop()
        block.manager.__exit__(RolledBack, RolledBack(), None)
        for each, state in block.before.items():
            each.state = state
        # An instance that was read in a state that has been undone is useless.
        self.held = [each for each in self.held if each.state not in block.states and each.obj.pk is not None]

    # reads

    @rule(session=SESSION, number=PICK, how=st.sampled_from(["whole", "whole", "part", "with", "replica"]))
    def read(self, session: int, number: int, how: str) -> None:
        keys = list(self.rows)
        key = keys[number % len(keys)]
        rows = self.rows_of(session)
        if how == "replica":
            rows, row = rows.using(self.replica), self.rows.get(key)
        else:
            row = self.seen(session, key)
        if how == "part":
            rows = rows.only(self.shape.text)
        if how == "with":
            rows = rows.only(self.shape.text, "version")
        obj = rows.filter(pk=key).first()
        assert (obj is None) == (row is None)
        if obj is not None:
            assert self.values_of(obj).items() <= row[1].items()
            self.held.append(Held(obj, key, None if how == "part" else row[0]))
            del self.held[:-4]

    @precondition(lambda self: self.held)
    @rule(session=SESSION, number=PICK, fields=st.sampled_from([None, None, "version", "text"]))
    def refresh(self, session: int, number: int, fields: str | None) -> None:
        held = self.pick(session, number)
        row = self.seen(session, held.key)
        self.rows_of(session)
        if row is None or held.obj.pk is None:
            return
        name = {"text": self.shape.text, "version": "version"}.get(str(fields))
        held.obj.refresh_from_db(using=self.aliases[session], fields=name and [name])
        if name == "version":
            held.state = None
        elif name is None and "version" not in held.obj.get_deferred_fields():
            held.state = row[0]

    @precondition(lambda self: self.held)
    @rule(session=SESSION, number=PICK)
    def look_at_the_version(self, session: int, number: int) -> None:
        held = self.pick(session, number)
        self.rows_of(session)
        if self.rows.get(held.key) and held.obj.pk is not None:
            assert held.obj.version

    # writes

    def create(self, session: int, key: Any = None) -> None:
        if self.is_taken(session, key):
            return
        if key is None:
            self.last_key += 1
            key = self.shape.key(self.last_key)
        self.rows_of(session)
        obj = self.shape.model(pk=key)
        if self.team:
            obj.team = self.team
        self.change(obj)
        exists = self.seen(session, key) is not None
        held = Held(obj, key, None)
        try:
            with atomic(self.aliases[session]):
                obj.save()
        except IntegrityError:
            assert exists
        else:
            assert not exists
            self.saved(session, held)
            self.held.append(held)
            if self.blocks[session]:  # after a rollback it would be inserted again, so it is dropped then
                del self.blocks[session][-1].before[held]

    @rule(session=SESSION, number=PICK)
    def insert_anew(self, session: int, number: int) -> None:
        keys = list(self.rows)
        self.create(session, keys[number % len(keys)])

    @rule(session=SESSION, number=PICK)
    def replace(self, session: int, number: int) -> None:
        """Delete a row regardless of its version, and create it again under its key."""
        keys = list(self.rows)
        key = keys[number % len(keys)]
        if self.seen(session, key) is not None and not self.is_taken(session, key):
            self.rows_of(session).filter(pk=key).delete()
            self.write(session, key, None)
            self.create(session, key)

    @precondition(lambda self: self.held)
    @rule(session=SESSION, number=PICK, how=st.sampled_from(["save", "all", "text"]))
    def save(self, session: int, number: int, how: str) -> None:
        held = self.pick(session, number)
        if held.obj.pk is None:
            return
        names = [self.shape.text] if how == "text" else []
        self.change(held.obj, *names)
        save = held.obj.save_with_version if self.blocks[session] or how != "save" else held.obj.save
        if self.do(session, [held], lambda: save(update_fields=names or None)):
            self.saved(session, held, *names)

    @precondition(lambda self: self.held)
    @rule(session=SESSION, number=PICK, by=st.sampled_from([-1, None, None]))
    def expect_another_version(self, session: int, number: int, by: int | None) -> None:
        """Expect another version than was read, perhaps the one that the row has now."""
        held = self.pick(session, number & ~1)
        if held.obj.pk is None or held.state is None:
            return
        right = held.obj.version
        now = self.rows_of(session).values_list("version", flat=True).filter(pk=held.key).first()
        held.obj.version = right + by if by else now
        if held.obj.version in (right, None):
            held.obj.version = right
            return
        state, held.state = held.state, -1
        assert not self.do(session, [held], held.obj.save_with_version)
        held.obj.version, held.state = right, state

    @precondition(lambda self: self.held)
    @rule(session=SESSION, number=PICK, are_two=st.booleans())
    def bulk_update(self, session: int, number: int, are_two: bool) -> None:
        held = [self.pick(session, number)]
        if are_two and (other := self.other_of(held[0])):
            held.append(other)
        if any(each.obj.pk is None for each in held):
            return
        for each in held:
            self.change(each.obj, self.shape.text)
        objs = [each.obj for each in held]
        if self.do(session, held, lambda: self.rows_of(session).bulk_update(objs, [self.shape.text])):
            for each in held:
                self.saved(session, each, self.shape.text)

    @precondition(lambda self: self.held)
    @rule(session=SESSION, number=PICK)
    def delete(self, session: int, number: int) -> None:
        held = self.pick(session, number)
        if held.obj.pk is not None and self.do(session, [held], held.obj.delete_with_version):
            self.write(session, held.key, None, held)
            self.held.remove(held)
            self.is_as_known(session, held.key)

    @rule(session=SESSION, number=PICK)
    def update_of_a_queryset(self, session: int, number: int) -> None:
        keys = list(self.rows)
        self.update(session, keys[number % len(keys)])

    def update(self, session: int, key: Any) -> bool:
        value, row = str(next(NUMBERS)), self.seen(session, key)
        if row is None or self.is_taken(session, key):
            return False
        assert self.rows_of(session).filter(pk=key).update(**{self.shape.text: value}) == 1
        self.write(session, key, {**row[1], self.shape.text: value})
        return True

    @precondition(lambda self: self.held)
    @rule(session=SESSION, number=PICK, at=st.integers(0, 3), how=st.sampled_from(["save", "delete"]))
    def write_while_another_one_writes(self, session: int, number: int, at: int, how: str) -> None:
        self.race(session, number, at, how)

    @precondition(lambda self: self.held)
    @rule(session=SESSION, number=PICK, at=st.integers(0, 3))
    def bulk_update_while_another_one_writes(self, session: int, number: int, at: int) -> None:
        self.race(session, number | 1, at, "bulk")

    def race(self, session: int, number: int, at: int, how: str) -> None:
        """The other session commits a change between two statements of this one's write."""
        session = session if self.blocks[session] else 1 - session
        held, other = self.pick(session, number), 1 - session
        if held.obj.pk is None or self.blocks[other]:
            return
        done: list[bool] = []
        sent = count()

        def between(execute: Any, *statement: Any) -> Any:
            if next(sent) == at:
                try:
                    done.append(self.update(other, held.key))
                except OperationalError:  # it would have to wait
                    done.append(False)
                Sessions.at_work = self.aliases[session]
            return execute(*statement)

        self.change(held.obj, self.shape.text)
        objs, rows, names = [held.obj], self.rows_of(session), [self.shape.text]
        work = {
            "bulk": lambda: rows.bulk_update(objs, names),
            "save": lambda: held.obj.save_with_version(update_fields=names),
            "delete": held.obj.delete_with_version,
        }[how]
        was_fresh = (row := self.seen(session, held.key)) is not None and row[0] == held.state
        mine = any(held.key in block.rows for block in self.blocks[session])
        try:
            with connections[self.aliases[session]].execute_wrapper(between):
                work()
        except StaleObject:
            assert not was_fresh or True in done, "refused without a reason"
        except ValueError:
            assert held.state is None
        else:
            assert was_fresh, "accepted, and it was stale"
            assert True not in done or mine, "accepted over a change that it has not seen"
            if how == "delete":
                self.write(session, held.key, None, held)
                self.held.remove(held)
            else:
                self.saved(session, held, self.shape.text)
        self.is_as_known(session, held.key)

    def teardown(self) -> None:
        for session in range(len(self.aliases)):
            while self.blocks[session]:
                self.roll_back(session)
        for key in self.rows:
            self.is_as_known(0, key)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("database", ["default", "postgresql"], indirect=True)
def test_versions_refuse_exactly_what_a_dictionary_says(database, shape, monkeypatch: pytest.MonkeyPatch) -> None:
    aliases = [f"{database} {name}" for name in ("a", "b", "replica")]
    quick = {"timeout": 0} if database == "default" else {"options": "-c lock_timeout=50"}
    given = connections.settings[database]
    for alias in aliases:
        options = {**given["OPTIONS"], **quick}
        monkeypatch.setitem(connections.settings, alias, {**given, "OPTIONS": options})
    known = {"shape": SHAPES[shape], "aliases": aliases[:2], "replica": aliases[2], "is_sqlite": database == "default"}
    machine: Any = type("Versions", (Versions,), known)
    try:
        with override_settings(DATABASE_ROUTERS=[f"{__name__}.Sessions"]):
            run_state_machine_as_test(machine, settings=SETTINGS)
    finally:
        for alias in aliases:
            connections[alias].close()
            del connections[alias]
