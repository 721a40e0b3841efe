"""Results whose code has changed since they were measured.

    pipetransformer bench --stale

A result depends on its benchmark's folder and on every module of this project that it imports, from there on and
inside functions too, and on the files that those name (configurations, the script of jobs). What starts a benchmark and
keeps its result changes no figure and is left out (``launch/``, the command line, tables, this). The commit is the one
in the result's ``environment``; lines are added and deleted ones between it and the files as they lie here.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchmarks.support.git import ROOT, git
from pipetransformer.commands.tables import make_console, make_table
from pipetransformer.errors import UserError
from pipetransformer.launch.entry import run_guarded

RESULTS = ROOT / "benchmarks" / "results"  # not measure's: that imports torch, which takes seconds
_LEFT_OUT = re.compile(r"pipetransformer/launch/.*|benchmarks/support/(command_line|kept|measure|stale|git|table)\.py")
_JOBS = {"run_pipetransformer.sh": "pipetransformer/trainer.py"}  # a script, and what the ranks that it starts run
_WORST = 2


@dataclass(frozen=True, slots=True)
class Age:
    """A result and what changed since.

    Attributes:
        changes: changed lines by file, most first; None where git does not know the commit.
    """

    name: str
    commit: str
    date: str
    changes: Mapping[str, int] | None

    def line(self) -> tuple[str, ...]:
        if self.changes is None:
            return (self.name, self.commit, self.date, "-", "-", "the commit is not in this repository")
        worst = ", ".join(f"{file} {lines:,}" for file, lines in list(self.changes.items())[:_WORST])
        return (self.name, self.commit, self.date, str(len(self.changes)), f"{sum(self.changes.values()):,}", worst)


def main() -> None:
    ages = ages_of(sorted(RESULTS.rglob("*.json")))
    titles = ("result", "commit", "date", "files", "lines", "most changed")
    make_console().print(make_table(titles, [age.line() for age in ages], left=("result", "commit", "most changed")))
    stale = sum(age.changes is None or bool(age.changes) for age in ages)
    print(f"{stale} of {len(ages)} are older than their code; -dirty: measured with changes that no commit has")


def ages_of(results: Sequence[Path]) -> list[Age]:
    """Most changed first. Raises UserError where there is no git, or no repository."""
    if git("rev-parse", "--git-dir", folder=ROOT) is None:
        raise UserError("bench --stale: it asks git for what changed; run it in a clone, where git is installed")
    ages = []
    for path in results:
        environment = json.loads(path.read_text()).get("environment", {})
        commit, command = environment.get("commit", "unknown"), environment.get("command", "")
        changed, code = changed_lines(commit.removesuffix("-dirty")), code_of(command)
        found = None if changed is None else {file: lines for file, lines in changed.items() if lines and file in code}
        ages.append(Age(path.relative_to(RESULTS).as_posix(), commit, environment.get("date", "unknown"), found))
    return sorted(ages, key=lambda age: -sum(age.changes.values()) if age.changes is not None else -sys.maxsize)


@cache
def changed_lines(commit: str) -> dict[str, int] | None:
    """By file of today, most first; a file that was moved counts for what changed in it. None: no such commit."""
    told = git("diff", "--numstat", "-M", "-z", commit, "--", folder=ROOT)
    if told is None:
        return None
    fields, lines = iter(told.split("\0")), dict[str, int]()
    for field in filter(None, fields):
        added, deleted, name = field.split("\t")
        if not name:  # moved: the old and the new name follow
            name = [next(fields), next(fields)][1]
        lines[name] = sum(int(number) for number in (added, deleted) if number != "-")
    return dict(sorted(lines.items(), key=lambda item: -item[1]))


@cache
def code_of(command: str) -> frozenset[str]:
    """Files on which the figures of a command depend, from the top of the project; all of the package's for a command
    that is not one of ``pipetransformer``'s."""
    words = [*shlex.split(command), "", "", ""][:3]
    folder = ROOT / "benchmarks" / words[2].replace("-", "_")
    if words[:2] == ["pipetransformer", "bench"] and words[2] and folder.is_dir():
        start = sorted(path for path in folder.iterdir() if path.is_file())
    elif words[0] == "pipetransformer" and (ROOT / "pipetransformer" / "commands" / f"{words[1]}.py").is_file():
        start = [ROOT / "pipetransformer" / "commands" / f"{words[1]}.py"]
    else:
        start = sorted((ROOT / "pipetransformer").rglob("*.py"))
    found, coming = set[str](), [path.relative_to(ROOT).as_posix() for path in start]
    while coming:
        name = coming.pop()
        if name not in found and not _LEFT_OUT.fullmatch(name):
            found.add(name)
            coming += _uses(name)
    return frozenset(found)


@cache
def _uses(name: str) -> tuple[str, ...]:
    """Files of this project that a file imports or names."""
    if name in _JOBS:
        return (_JOBS[name],)
    if not name.endswith(".py"):
        return ()
    paths = set(_mentioned(ast.parse((ROOT / name).read_text())))
    return tuple(sorted(path.relative_to(ROOT).as_posix() for path in paths))


def _mentioned(node: ast.AST) -> Iterator[Path]:
    """Imports for the type checker alone do not count."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    if isinstance(node, ast.Import):
        yield from filter(None, (_module(alias.name) for alias in node.names))
    elif isinstance(node, ast.ImportFrom) and node.module:
        whole = _module(node.module)
        yield from filter(None, (_module(f"{node.module}.{alias.name}") or whole for alias in node.names))
    elif isinstance(node, (ast.JoinedStr, ast.Constant)):
        yield from _files(node)
    for child in ast.iter_child_nodes(node):
        yield from _mentioned(child)


def _module(name: str) -> Path | None:
    base = ROOT.joinpath(*name.split("."))
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


def _files(node: ast.JoinedStr | ast.Constant) -> list[Path]:
    """Configurations and scripts of jobs that a text names; what an f-string fills in may be anything."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    text = "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in parts).removeprefix("config/")
    if text in _JOBS:
        return [ROOT / text]
    text = re.sub(r"\*+", "*", text)
    return list((ROOT / "config").glob(text)) if re.fullmatch(r"[\w*]+\.yaml", text) else []


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # behind ``| head``, which has read enough
    sys.exit(run_guarded(main))
