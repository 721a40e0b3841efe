"""Rows that are kept in a file as soon as each is measured: the command given again does what is missing.

A row counts as long as its settings and the code that made it are today's, but for comments and docstrings.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from benchmarks.support.git import ROOT
from benchmarks.support.measure import environment
from pipetransformer.errors import UserError
from pipetransformer.process.files import write_whole

__all__ = ["KeptRows", "key_of"]


class KeptRows:
    """The rows in a file, by key; a missing file holds none.

    Raises:
        UserError: if the file cannot be read, or holds something else.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: list[dict[str, object]] = []
        if path.exists():
            try:
                self._rows = json.loads(path.read_text(encoding="ascii"))["rows"]
                assert all(row["key"] and row["name"] and "environment" in row for row in self._rows)
            except (OSError, ValueError, TypeError, KeyError, AssertionError) as error:
                raise UserError(f"--output: {path} does not hold runs; delete it to measure all anew") from error

    def row(self, key: str) -> Mapping[str, object] | None:
        """None where it is missing."""
        return next((row for row in self._rows if row["key"] == key), None)

    def keep(self, name: str, key: str, row: Mapping[str, object]) -> None:
        """In the place of the row of the same name, which had other settings or other code."""
        kept = {"name": name, "key": key, **row, "environment": environment()}
        self._rows = [other for other in self._rows if other["name"] != name] + [kept]
        lines = ",\n ".join(map(json.dumps, self._rows))
        text = f'{{\n"environment": {json.dumps(environment())},\n"rows": [\n {lines}\n]\n}}\n'
        write_whole(self._path, text, key="--output")


def key_of(settings: object, *, code: Sequence[str]) -> str:
    """Of the settings (as JSON) and of the files that make the row (patterns from the top of the project), in hex; of
    Python's files the statements alone count."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for name, text in sources(code).items():
        content = _statements(text) if name.endswith(".py") else text
        digest.update(f"{name} {len(content)} {content}".encode())
    return digest.hexdigest()[:16]


@cache
def _statements(text: str) -> str:
    """A module without its comments and docstrings."""
    return ast.unparse(_WithoutStrings().visit(ast.parse(text)))


class _WithoutStrings(ast.NodeTransformer):
    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        return ast.Pass() if isinstance(node.value, ast.Constant) else node


def sources(patterns: Sequence[str]) -> Mapping[str, str]:
    """By path from the top of the project."""
    paths = sorted(path for pattern in patterns for path in ROOT.glob(pattern))
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}
