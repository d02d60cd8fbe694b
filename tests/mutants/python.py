"""The mutants of a Python file: one node of its syntax tree is changed, and the tree is turned back into source.

Nothing is changed that tests need not notice: annotations, docstrings, error messages, `strict=True`, and calls of a
logger.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from tests.mutants import sql
from tests.mutants.mutant import Mutant

COMPARISONS: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: Final[dict[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
}
IS_LOGGED: Final = re.compile(r"\b(log|logger|warnings)\.")
DECLARES: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
NOT_OURS: Final = {"annotation", "returns", "decorator_list"}
FALSE: Final = {"None", "False", "0.0", "''", "()", "frozenset()"}
"""Returned values that are false, as None would be. Another mutant turns False into True."""
SHOWN: Final = 90
"""Characters of the code that a report shows at most."""


def mutants(path: str, text: str) -> list[Mutant]:
    tree = ast.parse(text)
    original = ast.unparse(tree)
    found: list[Mutant] = []
    for change in list(_changes(tree)):
        old = change.swap(change.value)
        source = ast.unparse(tree)
        change.swap(old)
        found.append(Mutant(path, change.line, len(found), *_difference(original, source), source, change.statement))
    return found


@dataclass(frozen=True)
class _Change:
    line: int
    statement: tuple[int, int]
    place: Any
    """A node, or a list of nodes."""
    key: str | int
    """The node's field, or the list's index."""
    value: object

    def swap(self, value: object) -> object:
        """Put this value in its place, and return the old one."""
        if isinstance(self.key, int):
            old, self.place[self.key] = self.place[self.key], value
        else:
            old = getattr(self.place, self.key)
            setattr(self.place, self.key, value)
        return old


def _changes(tree: ast.Module) -> Iterator[_Change]:
    for body, at, statement, is_called in _statements(tree):
        lines = _lines(statement) if is_called or isinstance(statement, DECLARES) else (0, 0)
        for node in _own_expressions(statement):
            for place, key, value in _faults(node):
                yield _Change(getattr(node, "lineno", 0), lines, place, key, value)
        if (instead := _instead(statement)) is not None:
            yield _Change(statement.lineno, lines, body, at, instead)


def _lines(statement: ast.stmt) -> tuple[int, int]:
    """Return a statement's first and last line; of a declaration those of its body: the rest runs at import only."""
    first = statement.body[0] if isinstance(statement, DECLARES) else statement
    return first.lineno, statement.end_lineno or statement.lineno


def _statements(node: ast.AST, *, is_called: bool = False) -> Iterator[tuple[list[ast.stmt], int, ast.stmt, bool]]:
    """Yield every statement that runs, with its list and index, and whether a call runs it and not the import."""
    is_called = is_called or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        body = getattr(node, name, None)
        if not isinstance(body, list):
            continue
        for at, each in enumerate(body):
            if _is_told_only(each):
                continue
            if isinstance(each, ast.stmt):
                yield body, at, each, is_called
            yield from _statements(each, is_called=is_called)


def _is_told_only(node: ast.AST) -> bool:
    """Return whether a node is only for the reader, the type checker or the log."""
    if isinstance(node, ast.Import | ast.ImportFrom | ast.Pass):
        return True
    if isinstance(node, ast.Assign) and re.match(r"(TypeVar|ParamSpec)\(", ast.unparse(node.value)):
        return True
    if isinstance(node, ast.Expr) and (isinstance(node.value, ast.Constant) or IS_LOGGED.search(ast.unparse(node))):
        return True
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def _own_expressions(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield the statement and its own expressions, without those of statements inside it."""
    todo: list[ast.AST] = [statement]
    while todo:
        node = todo.pop(0)
        yield node
        if isinstance(node, ast.Raise) or (isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal"):
            continue  # the message of an error; a type
        if isinstance(node, ast.keyword) and node.arg == "strict":
            continue  # of zip(): an assertion
        for name, value in ast.iter_fields(node):
            if name not in NOT_OURS:
                todo += [each for each in (value if isinstance(value, list) else [value]) if _is_expression(each)]
        if isinstance(node, ast.JoinedStr):
            todo = [each for each in todo if each not in node.values or not _is_str(each)]


def _is_expression(node: object) -> bool:
    return isinstance(node, ast.AST) and not isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case)


def _faults(node: ast.AST) -> Iterator[tuple[object, str | int, object]]:
    match node:
        case ast.Compare(ops=ops):
            for at, each in enumerate(ops):
                if other := COMPARISONS.get(type(each)):
                    yield ops, at, other()
        case ast.BoolOp(op=op):
            yield node, "op", ast.Or() if isinstance(op, ast.And) else ast.And()
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if (other_way := ARITHMETIC.get(type(op))) and not _is_text(node):
            yield node, "op", other_way()
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield node, "test", _negated(test)
        case ast.Constant():
            yield from _of_constant(node)
        case ast.JoinedStr(values=parts):
            yield from _of_parts([part for part in parts if isinstance(part, ast.Constant)])
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) not in FALSE:
            yield node, "value", ast.Constant(None)
        case _:
            pass


def _of_parts(texts: list[ast.Constant]) -> Iterator[tuple[object, str | int, object]]:
    """Yield the faults of an f-string: only the whole of it shows whether it is SQL."""
    if sql.is_sql("".join(str(text.value) for text in texts)):
        for text in texts:
            for changed in sql.changed(str(text.value)):
                yield text, "value", changed


def _of_constant(node: ast.Constant) -> Iterator[tuple[object, str | int, object]]:
    match node.value:
        case bool(value):
            yield node, "value", not value
        case int(value) | float(value):
            yield node, "value", value + 1
        case str(value) if sql.is_sql(value):
            for changed in sql.changed(value):
                yield node, "value", changed


def _is_text(node: ast.AST) -> bool:
    """Return whether it adds texts or sequences, which cannot be subtracted."""
    return any(
        isinstance(each, ast.JoinedStr | ast.List | ast.Tuple) or _is_str(each) for each in ast.iter_child_nodes(node)
    )


def _is_str(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _negated(test: ast.expr) -> ast.expr:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return test.operand
    return ast.UnaryOp(ast.Not(), test)


def _instead(statement: ast.stmt) -> ast.stmt | None:
    """Return what replaces a removed statement; None if its removal is no fault, or another mutant already."""
    match statement:
        case ast.Expr() | ast.Raise() | ast.AugAssign() | ast.Delete():
            return ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]):
            return ast.Pass()
        case ast.Break():
            return ast.Continue()
        case ast.Continue():
            return ast.Break()
        case _:
            return None


def _difference(before: str, after: str) -> tuple[str, str]:
    """Return the first line that differs, before and after; of a long one only the text around the difference."""
    pairs = zip(before.splitlines(), after.splitlines(), strict=False)
    old, new = next(((old.strip(), new.strip()) for old, new in pairs if old != new), (before, after))
    at = next((at for at, (one, other) in enumerate(zip(old, new, strict=False)) if one != other), 0)
    return _around(old, at), _around(new, at)


def _around(line: str, at: int) -> str:
    if len(line) <= SHOWN:
        return line
    begin = max(0, at - SHOWN // 2)
    return "…" * (begin > 0) + line[begin : begin + SHOWN] + "…" * (begin + SHOWN < len(line))
