"""Small changes of meaning, drawn from source texts: opposite comparisons, numbers off by one, dropped calls, swapped
arguments.

Only expressions in bodies of functions are changed, found by syntax. Left alone, because a change of them changes no
behaviour, or none that a test on a CPU can see:

- texts for a reader: docstrings, f-strings, arguments of ``UserError``, ``line`` and ``print``, the progress bar, what
  is raised;
- what only a type checker reads: annotations, ``__all__``, ``if TYPE_CHECKING``, assertions, overloads;
- numbers that set a size or a speed and no result: constants of modules and classes and what is added to them, defaults
  of arguments, floors and caps (arguments of ``max``, ``min``, ``clamp``), factors and powers;
- calls that make a write safe against a power cut, wait for a device or close what the process's end closes too;
- branches for a GPU;
- arguments whose order is free (``max``, ``gcd``, ``equal``), and comparisons without their equality (``<`` for
  ``<=``), which mean nothing between measured times.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

__all__ = ["OPERATORS", "Change", "changes"]

OPERATORS = ("comparison", "off by one", "dropped call", "swapped argument")

_OPPOSITE = {
    ast.Lt: ("<", ">="),
    ast.LtE: ("<=", ">"),
    ast.Gt: (">", "<="),
    ast.GtE: (">=", "<"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
_SPOKEN = {"UserError", "line", "print", "warning", "format", "join", "match", "fullmatch", "cast", "isinstance"}
_UNSEEN = {
    "barrier",
    "synchronize",
    "flush",
    "fsync",
    "close",
    "cancel",
    "record_stream",
    "reset_peak_memory",
    "update",  # of the progress bar
}
_BOUNDS = {"max", "min", "clamp", "clamp_max", "clamp_min"}
_FREE_ORDER = _BOUNDS | {"gcd", "lcm", "equal", "maximum", "minimum", "isclose", "isinstance", "zip", "product"}
_CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]+")
_GPU = re.compile(r"cuda|gpu|stream|pinned|device", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Change:
    """One replacement in a source text.

    Attributes:
        start, stop: the replaced bytes of the text in UTF-8.
        before, after: their text and the new one. line: the line of the first, from 1.
    """

    operator: str
    line: int
    start: int
    stop: int
    before: str
    after: str

    def applied(self, source: str) -> str:
        text = source.encode()
        return (text[: self.start] + self.after.encode() + text[self.stop :]).decode()


def changes(source: str) -> list[Change]:
    """All possible changes of a module, in the order of its text."""
    found = _Finder(source)
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for statement in function.body:
                found.visit(statement)
    return sorted(set(found.changes), key=lambda change: (change.start, change.stop, change.operator, change.after))


class _Finder(ast.NodeVisitor):
    def __init__(self, source: str) -> None:
        self._text = source.encode()
        lengths = [len(line) for line in self._text.splitlines(keepends=True)]
        self._line_starts = [sum(lengths[:number]) for number in range(len(lengths))]
        self.changes: list[Change] = []

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        first, last = self._line_starts[node.lineno - 1], self._line_starts[node.end_lineno - 1]
        return first + node.col_offset, last + node.end_col_offset

    def _replace(self, operator: str, start: int, stop: int, after: str) -> None:
        before, line = self._text[start:stop].decode(), self._text.count(b"\n", 0, start) + 1
        self.changes.append(Change(operator, line, start, stop, before, after))

    # ---- left alone ------------------------------------------------------------------------------------------------

    def _skip(self, node: ast.AST) -> None:
        pass

    visit_Assert = visit_Raise = visit_JoinedStr = visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _skip
    visit_Lambda = ast.NodeVisitor.generic_visit

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        test = ast.unparse(node.test)
        if "TYPE_CHECKING" in test:
            return
        if not _GPU.search(test):
            self.generic_visit(node)
        else:
            for statement in node.orelse:
                self.visit(statement)

    # ---- the four operators ----------------------------------------------------------------------------------------

    def visit_Compare(self, node: ast.Compare) -> None:
        self.generic_visit(node)
        if len(node.ops) == 1 and not _GPU.search(ast.unparse(node)):
            old, new = _OPPOSITE[type(node.ops[0])]
            start, stop = self._span(node.left)[1], self._span(node.comparators[0])[0]
            between = self._text[start:stop].decode()
            place = re.search(old.replace(" ", r"\s+") if old.isalpha() is False else rf"\b{old}\b", between)
            assert place is not None, between
            self._replace("comparison", start + place.start(), start + place.end(), new)
        self._off_by_one(*node.comparators)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self.generic_visit(node)
        if isinstance(node.op, (ast.Add, ast.Sub)) and not _CONSTANT.fullmatch(ast.unparse(node.left)):
            self._off_by_one(node.left, node.right)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.generic_visit(node)
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        for part in parts:
            if isinstance(part, ast.Slice):
                self._off_by_one(part.lower, part.upper)
            else:
                self._off_by_one(part)

    def _off_by_one(self, *nodes: ast.expr | None) -> None:
        """Whole numbers, also negative ones, get one more."""
        for node in nodes:
            inner = node.operand if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) else node
            if isinstance(inner, ast.Constant) and type(inner.value) is int and abs(inner.value) < 100:
                assert node is not None
                value = -inner.value if inner is not node else inner.value
                self._replace("off by one", *self._span(node), str(value - 1 if value < 0 else value + 1))

    def visit_Expr(self, node: ast.Expr) -> None:
        self.generic_visit(node)
        if isinstance(node.value, ast.Call) and _name(node.value) not in _UNSEEN | _SPOKEN:
            self._replace("dropped call", *self._span(node), "pass")

    def visit_Call(self, node: ast.Call) -> None:
        name = _name(node)
        if name in _SPOKEN:
            return
        self.generic_visit(node)
        if name == "range":
            self._off_by_one(*node.args)
        if name in _FREE_ORDER:
            return
        pairs = list(zip(node.args, node.args[1:]))
        named = [keyword.value for keyword in node.keywords if keyword.arg is not None]
        for one, other in (*pairs, *zip(named, named[1:])):
            if isinstance(one, ast.Starred) or isinstance(other, ast.Starred) or ast.dump(one) == ast.dump(other):
                continue
            (start, middle), (after, stop) = self._span(one), self._span(other)
            first, between, second = (
                self._text[a:b].decode() for a, b in ((start, middle), (middle, after), (after, stop))
            )
            self._replace("swapped argument", start, stop, second + between + first)


def _name(call: ast.Call) -> str:
    """The name of what is called, without what it belongs to; "line" for the progress bar too."""
    name = ast.unparse(call.func)
    return "line" if name.endswith("_tracker.step") else name.rpartition(".")[2]
