"""The documentation cannot rot: every Python block runs, every name exists, every link leads somewhere.

The blocks of a page run from top to bottom in one namespace, which the page itself can import as `shop.models`, on SQLite and a real
Redis; SQLAlchemy's engines in it are disposed of at the end. `<!-- run … -->` is code that readers do not see; a block below `<!-- not run: why -->` is only compiled.
"""

import dataclasses
import importlib
import inspect
import json
import re
import sys
import unittest
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from django.db import connection, models
from django.db.models.signals import class_prepared
from django.test import override_settings
from django.test.utils import isolate_apps
from sqlalchemy import Engine

from django_dlock import conf
from django_dlock.locks import Lock
from dlock_core import errors
from dlock_core import inspect as listing
from dlock_core.backends.redis.backend import RedisBackend
from dlock_core.cli.app import app
from dlock_core.doctor import Finding
from dlock_core.transactions.transaction_lock import TiedLock
from dlock_core.web import http
from sqla_dlock import stores
from sqla_dlock.locks import LockOptions
from tests.servers import Server

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md"), ROOT / "example_project/README.md"])
FENCE = re.compile(r"^(?:<!-- not run: (?P<why>.+?) -->\n)?```(?P<language>\w*)\n(?P<code>.*?)^```$", re.M | re.S)
HIDDEN = re.compile(r"^<!-- run\n(?P<code>.*?)^-->$", re.M | re.S)
LINK = re.compile(r"(?<!!)\[[^\]]+\]\((?!https?:)(?P<page>[^)#\s]*)(?:#(?P<anchor>[^)\s]+))?\)")
PARTLY_PUBLIC = {
    "dlock_core.backends.redis",
    "django_dlock.querysets",
    "django_dlock.versions",
    "sqla_dlock.fencing",
    "sqla_dlock.locks",
    "sqla_dlock.versions",
}
REDIS_URL = "redis://localhost:6379/0"
SQLITE_FILE = "///shop.db"

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def read(page: str) -> str:
    return (ROOT / "docs" / page).read_text()


def blocks(page: Path) -> Iterator[tuple[int, str, str]]:
    """Yield the Python blocks of a page, shown and hidden: line, code, and why it is not to be run."""
    text = page.read_text()
    shown = (match for match in FENCE.finditer(text) if match["language"] == "python")
    for match in sorted([*shown, *HIDDEN.finditer(text)], key=lambda match: match.start()):
        yield text.count("\n", 0, match.start("code")), match["code"], match.groupdict().get("why") or ""


@every_page
def test_every_python_block_compiles(page: Path) -> None:
    for line, code, _ in blocks(page):
        compile("\n" * line + code, str(page), "exec")


@pytest.fixture
def tables(use_database: Any) -> Iterator[None]:
    """Make the table of every model as soon as a page defines it."""
    made: list[type[models.Model]] = []

    def make(sender: type[models.Model], **_: Any) -> None:
        with connection.schema_editor() as editor:
            editor.create_model(sender)
        made.append(sender)

    use_database("default")
    class_prepared.connect(make)
    with isolate_apps("tests.testapp"):
        yield
    class_prepared.disconnect(make)
    for model in reversed(made):
        with connection.schema_editor() as editor:
            editor.delete_model(model)


@pytest.fixture
def namespace(tables: None, redis_server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The namespace of the blocks of a page: a module of the test app, under the names by which pages import it."""
    page, shop = ModuleType("tests.testapp.page"), ModuleType("shop")
    vars(shop).update(models=page, views=page)
    for name, module in {page.__name__: page, "shop": shop, "shop.models": page, "shop.views": page}.items():
        monkeypatch.setitem(sys.modules, name, module)
    vars(page).update(INSTALLED_APPS=[], MIDDLEWARE=[])
    monkeypatch.setattr(stores, "_stores", {})
    with override_settings(DLOCK={"default": {"BACKEND": redis_server.url, "WAIT": 0.1}}):
        yield vars(page)
    for engine in vars(page).values():
        if issubclass(type(engine), Engine):  # isinstance would ask a Celery task, which is a proxy, for its app
            engine.dispose()


@pytest.mark.parametrize("page", [page for page in PAGES if any(blocks(page))], ids=lambda page: page.stem)
def test_every_python_block_runs(page: Path, namespace: dict[str, Any], redis_server: Server, tmp_path: Path) -> None:
    for line, code, why in blocks(page):
        if not why:
            here = code.replace(REDIS_URL, redis_server.url).replace(SQLITE_FILE, f"///{tmp_path}/shop.db")
            exec(compile("\n" * line + here, str(page), "exec"), namespace)
    run_test_cases(namespace)


def run_test_cases(namespace: dict[str, Any]) -> None:
    for case in list(namespace.values()):
        if isinstance(case, type) and issubclass(case, unittest.TestCase) and case.__module__ == namespace["__name__"]:
            result = unittest.defaultTestLoader.loadTestsFromTestCase(case).run(unittest.TestResult())
            assert result.testsRun > 0
            assert [*result.failures, *result.errors] == []


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@every_page
def test_every_link_leads_somewhere(page: Path) -> None:
    for match in LINK.finditer(FENCE.sub("", page.read_text())):
        target = (page.parent / match["page"]).resolve() if match["page"] else page
        assert target.exists(), match[0]
        assert not match["anchor"] or match["anchor"] in anchors(target), match[0]


def test_every_page_can_be_reached_from_the_index() -> None:
    seen, todo = set[Path](), [ROOT / "docs/index.md"]
    while todo:
        page = todo.pop()
        seen.add(page)
        links = (
            page.parent / match["page"] for match in LINK.finditer(page.read_text()) if match["page"].endswith(".md")
        )
        todo += [link.resolve() for link in links if link.resolve() not in seen]
    assert seen >= set(ROOT.glob("docs/**/*.md"))


def rows(text: str, heading: str = "") -> list[list[str]]:
    """Return the cells of the tables below a heading, or of a page, without heads and rules."""
    if heading:
        text = re.search(rf"^#+ {re.escape(heading)}$\n(.*?)(?=^#|\Z)", text, re.M | re.S)[1]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    rules = {n for n, row in enumerate(cells) if set(row[0]) == {"-"}}
    return [row for n, row in enumerate(cells) if n not in rules and n + 1 not in rules]


def code(cell: str) -> str:
    return re.match(r"`([^`]+)`", cell)[1].replace("\\|", "|")


def signature(thing: Any) -> str:
    """Return the signature of a thing, without annotations and self."""
    if isinstance(thing, property) or not callable(thing):
        return ""
    given = inspect.signature(thing)
    plain = [each.replace(annotation=inspect.Parameter.empty) for name, each in given.parameters.items()]
    plain = plain[1:] if plain and plain[0].name == "self" else plain
    plain = [each for each in plain if each.name != "unknown"]  # only there to be refused
    text = str(given.replace(parameters=plain, return_annotation=inspect.Signature.empty))
    return re.sub(r"Ellipsis|NOT_GIVEN", "...", text)


def documented() -> list[tuple[str, str]]:
    """Return module and code of every row of the reference of names."""
    text = read("reference/api.md")
    return [
        (module, code(row[0]))
        for module in re.findall(r"^## `([\w.]+)`$", text, re.M)
        for row in rows(text, f"`{module}`")
    ]


@pytest.mark.parametrize(("module", "call"), documented(), ids=lambda text: text.partition("(")[0])
def test_documented_name_exists_and_is_called_that_way(module: str, call: str) -> None:
    name, parenthesis, rest = call.partition("(")
    thing: Any = importlib.import_module(module)
    for part in name.split("."):
        thing = inspect.getattr_static(thing, part) if isinstance(thing, type) else getattr(thing, part)
    thing = thing.__func__ if isinstance(thing, classmethod | staticmethod) else thing
    if parenthesis:
        assert signature(thing).replace("(cls, ", "(") == parenthesis + rest


@pytest.mark.parametrize("module", sorted({module for module, _ in documented()} - PARTLY_PUBLIC))
def test_every_public_name_is_documented(module: str) -> None:
    names = {re.split(r"[.(]", call)[0] for home, call in documented() if home == module}
    assert names >= set(importlib.import_module(module).__all__) - set(errors.__all__)


def test_every_option_of_a_lock_is_documented() -> None:
    options = {code(row[0]): code(row[1]) for row in rows(read("reference/api.md"), "Options of `Lock`")}
    known = inspect.signature(Lock).parameters | inspect.signature(TiedLock).parameters
    known = {name: each.default for name, each in known.items() if each.kind is each.KEYWORD_ONLY}
    assert options == {name: repr(default).replace("Ellipsis", "...") for name, default in known.items()}
    assert {*options} - {"using"} | {"bind"} == LockOptions.__optional_keys__


def test_every_error_is_documented_with_its_http_status() -> None:
    statuses = {code(row[0]): row[2] for row in rows(read("reference/errors.md"), "All errors")}
    known = {kind.__name__: str(int(problem.status)) for kind, problem in http._PROBLEMS.items()}
    assert statuses == {name: known.get(name, "500") for name in errors.__all__ if name != "DLockError"}


def test_every_attribute_of_an_error_exists() -> None:
    for row in rows(read("reference/errors.md"), "All errors"):
        kind = getattr(errors, code(row[0]))
        for attribute in re.findall(r"`\.(\w+)`", row[1]):
            assert f"self.{attribute}" in inspect.getsource(kind) or hasattr(kind, attribute), (kind, attribute)


def test_every_check_is_documented() -> None:
    source = "".join(file.read_text() for file in ROOT.glob("django_dlock/checks/*.py"))
    ids = [code(row[0]) for row in rows(read("reference/checks.md"))]
    assert sorted(ids) == sorted(set(re.findall(r"dlock\.[EWI]\d{3}", source)))


def test_every_setting_is_documented_with_its_default() -> None:
    keys = {code(row[0]): row[1] for row in rows(read("reference/settings.md"), "`DLOCK`")}
    assert tuple(keys) == conf.ENTRY_KEYS
    assert keys["TTL"] == f"`{conf.DEFAULT_TTL_S:g}`"
    assert keys["WAIT"] == f"`{conf.DEFAULT_WAIT_S:g}`"


def test_every_option_of_redis_is_documented_with_its_default() -> None:
    options = {code(row[0]): row[1] for row in rows(read("reference/settings.md"), "`OPTIONS` of Redis")}
    known = list(inspect.signature(RedisBackend).parameters.values())[1:]
    assert options == {each.name: f"`{json.dumps(each.default)}`" for each in known}


def test_example_of_the_listing_has_exactly_its_fields() -> None:
    text = read("reference/snapshot.md")
    example = json.loads(next(match["code"] for match in FENCE.finditer(text) if match["language"] == "json"))
    fields = [field.name for field in dataclasses.fields(listing.Entry)]
    assert list(example) == list(listing.Snapshot().as_dict())
    assert [list(entry) for entry in example["entries"]] == [fields] * len(example["entries"])
    assert [code(row[0]) for row in rows(text, "An entry")] == fields
    assert [list(each) for each in example["unreadable"]] == [["source", "reason"]]


def test_every_option_of_the_commands_exists() -> None:
    known = {
        verb: {option for each in command.params for option in each.opts} for verb, command in app.commands.items()
    }
    for page in PAGES:
        for verb, options in re.findall(rf"\bdlock ({'|'.join(known)})\b([^\n`]*)", page.read_text()):
            assert set(re.findall(r"--[a-z-]+", options)) <= known[verb], (page, verb)


def test_permissions_for_redis_are_those_of_the_scripts() -> None:
    scripts = "".join(file.read_text() for file in ROOT.glob("dlock_core/backends/redis/lua/*.lua"))
    called = {name.lower() for name in re.findall(r"redis\.p?call\('(\w+)'", scripts)}
    line = re.search(r"ACL SETUSER .*", read("howto/operations.md"))[0]
    assert set(re.findall(r"\+(\w+)", line)) >= called | {"eval", "evalsha", "blpop", "blmove"}


def test_json_of_the_commands_has_exactly_the_documented_fields() -> None:
    text = read("reference/commands.md")
    released, doctored, purged = [
        json.loads(match["code"]) for match in FENCE.finditer(text) if match["language"] == "json"
    ]
    assert list(released) == ["schema", "released", "by"]
    assert list(released["released"]) == [field.name for field in dataclasses.fields(listing.Entry)]
    fields = [field.name for field in dataclasses.fields(Finding)]
    assert [list(finding) for finding in doctored["findings"]] == [fields]
    assert [code(row[0]) for row in rows(text, "JSON of doctor")] == fields
    assert list(purged) == ["schema", "database", "days", "removed"]


def test_every_verb_and_option_of_the_commands_is_documented() -> None:
    text = read("reference/commands.md")
    assert {code(row[0]).split()[0] for row in rows(text, "Commands")} == set(app.commands)
    options = {each.opts[0] for verb in app.commands.values() for each in verb.params if each.opts[0][:2] == "--"}
    assert {code(row[0]) for row in rows(text, "Options")} == options
