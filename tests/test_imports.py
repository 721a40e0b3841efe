"""The laws of the house: imports run one way, rooms keep to themselves, files and functions fit a screen.

Every law is a function of source texts by module name, so that a planted violation can show that it finds one.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble
from torch.export import ExportedProgram

import pipetransformer

HOUSE = "pipetransformer"
ROOT = Path(pipetransformer.__file__).parent
Sources = Mapping[str, str]
Law = Callable[[Sources], list[str]]
Moment = Literal["import", "call", "check"]

# A room imports only rooms above it, at any moment: when it is imported, when a function runs, for the type checker.
ORDER = {
    "errors": "the one exception, for everybody",
    "plan": "plain numbers that the controllers pass to each other",
    "config": "the schema, which asks the schedules of plan what they take",
    "process": "this process among its peers; needs errors alone",
    "adapter": "torch's private names; tells process how ranks ended",
    "data": "datasets and batches, measured and led by ranks of process",
    "models": "chains, built for what data is",
    "freeze": "a controller: gradient norms to n",
    "dp": "a controller: gradients and weights between replicas",
    "cache": "a controller: activations of a model for samples of data",
    "engine": "a rank at work: chains, batches, reducer and cache reader together",
    "pipe": "a controller: plans, from costs measured on the engine",
    "graphs": "models that are no chain, cut by the planner of pipe",
    "simulation": "clusters that are not there, planned by the planner of pipe",
    "run": "one run and its folder, made of all controllers' parts",
    "inference": "saved models at work, found by their run",
    "trainer": "the loop over controllers, engine and run",
    "launch": "the start of a job: configuration first, then the trainer",
    "commands": "questions from the console to any of the above",
    "__main__": "python -m pipetransformer",
}
CONTROLLERS = ("freeze", "pipe", "dp", "cache")
WITHOUT_TORCH = ("plan", "config", "freeze", "pipe.planner")
MOST_NAMES, MOST_LINES, LONGEST_FUNCTION = 19, 400, 60


# ---- reading imports -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Import:
    """One name that a module imports.

    Attributes:
        target: dotted path, the name included: ``torch.nn.Linear``.
        local: the name in the module, and the path that it stands for: ("np", "numpy").
        moment: of the import: with the module, with a call of a function, or for the type checker alone.
    """

    target: str
    local: tuple[str, str]
    moment: Moment


tree_of = cache(ast.parse)  # every law reads the same texts, again for each violation that is planted


@cache
def imports_of(text: str) -> tuple[Import, ...]:
    return tuple(_imports(tree_of(text).body, "import"))


def _imports(statements: Iterable[ast.AST], moment: Moment) -> Iterator[Import]:
    for statement in statements:
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                top = alias.name.partition(".")[0]
                local = (alias.asname, alias.name) if alias.asname else (top, top)
                yield Import(alias.name, local, moment)
        elif isinstance(statement, ast.ImportFrom):
            assert statement.level == 0, f"a relative import: {ast.unparse(statement)}; write the whole path"
            for alias in statement.names:
                path = f"{statement.module}.{alias.name}"
                yield Import(path, (alias.asname or alias.name, path), moment)
        elif isinstance(statement, ast.If) and ast.unparse(statement.test).endswith("TYPE_CHECKING"):
            yield from _imports(statement.body, "check")
            yield from _imports(statement.orelse, moment)
        else:
            is_function = isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef))
            later: Moment = "call" if is_function and moment == "import" else moment
            yield from _imports(ast.iter_child_nodes(statement), later)


def edges(sources: Sources, *moments: Moment) -> Iterator[tuple[str, str]]:
    """(module, imported module) of the house; a name that is no module stands for the module that has it."""
    for module, text in sources.items():
        for found in imports_of(text):
            target = found.target if found.target in sources else found.target.rpartition(".")[0]
            if found.target.partition(".")[0] == HOUSE and found.moment in (moments or ("import", "call", "check")):
                assert target in sources, f"{module} imports {found.target}, which is not there"
                yield module, target


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else module


def circle(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """A circle of ``pairs``, from a member back to itself; empty where there is none."""
    followers: dict[str, set[str]] = {}
    for one, other in pairs:
        if one != other:
            followers.setdefault(one, set()).add(other)
    try:
        TopologicalSorter(followers).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


# ---- the laws: what is wrong, a line each ----------------------------------------------------------------------------


def circles(sources: Sources) -> list[str]:
    """No circle of modules and none of rooms, when they are imported."""
    pairs = list(edges(sources, "import"))
    found = (circle(pairs), circle((room_of(one), room_of(other)) for one, other in pairs))
    return [" -> ".join(names) for names in found if names]


def meetings(sources: Sources) -> list[str]:
    """No controller imports another: they meet in the trainer."""
    return [
        f"{one} imports {other}"
        for one, other in edges(sources)
        if room_of(one) != room_of(other) and {room_of(one), room_of(other)} <= set(CONTROLLERS)
    ]


def steps_up(sources: Sources) -> list[str]:
    """Rooms import only rooms above them in ``ORDER``."""
    place = {room: number for number, room in enumerate(ORDER)}
    unknown = {room_of(module) for module in sources if module != HOUSE} - place.keys()
    return [f"{room} has no place in ORDER" for room in sorted(unknown)] + [
        f"{one} imports {other}"
        for one, other in edges(sources)
        if unknown.isdisjoint({room_of(one), room_of(other)}) and place[room_of(one)] < place[room_of(other)]
    ]


def private_uses(sources: Sources) -> list[str]:
    """Only ``adapter`` touches private names of torch: of its modules, and of its objects."""
    return [
        f"{module}: {use}"
        for module, text in sources.items()
        if room_of(module) != "adapter"
        for use in _private_uses(text)
    ]


@cache
def _private_uses(text: str) -> tuple[str, ...]:
    return tuple(_find_private_uses(text))


def _find_private_uses(text: str) -> Iterator[str]:
    tree = tree_of(text)
    roots: dict[str, str] = {}
    for found in imports_of(text):
        if found.target.partition(".")[0] == "torch":
            roots.update([found.local])
            if _is_private(found.target):
                yield found.target
    own = {node.attr for node in ast.walk(tree) if _is_own(node) and isinstance(node.ctx, ast.Store)}
    own |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            first, *names = ast.unparse(node).split(".")
            if first in roots:
                yield ".".join((roots[first], *names))
            elif node.attr in PRIVATE_NAMES and not (_is_own(node) and node.attr in own):
                yield ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr"):
            words = {given.value for given in node.args if isinstance(given, ast.Constant)}
            yield from [ast.unparse(node)] if words & PRIVATE_NAMES else []


def _is_own(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _is_private(path: str) -> bool:
    return any(name.startswith("_") and not name.endswith("__") for name in path.split("."))


def _private_names() -> frozenset[str]:
    """Private attributes of torch's objects, from one of each."""
    layer = nn.Linear(1, 1)
    graph = fx.symbolic_trace(layer)
    some: tuple[Any, ...] = (
        *(layer, layer.weight, layer.weight.untyped_storage(), layer(torch.ones(1)).grad_fn, torch.Generator()),
        *(graph, graph.graph, next(iter(graph.graph.nodes)), torch.ops.aten.add, torch.ops.aten.add.Tensor),
        *(torch.optim.AdamW(layer.parameters()), torch.device("cpu"), torch.float32, torch.cuda.Stream),
        *(ExportedProgram, dist.ProcessGroup, dist.TCPStore, PipelineStage, ScheduleInterleavedZeroBubble),  # type: ignore[attr-defined]
    )
    names = {name for thing in some for name in (*dir(thing), *getattr(thing, "__dict__", ()))}
    return frozenset(name for name in names if name.startswith("_") and not name.startswith("__"))


PRIVATE_NAMES = _private_names()


def sizes(sources: Sources) -> list[str]:
    """Files and functions that a reader can take in."""
    return [f"{module}{line}" for module, text in sources.items() for line in _sizes(text)]


@cache
def _sizes(text: str) -> tuple[str, ...]:
    functions = [node for node in ast.walk(tree_of(text)) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    lengths = [("", len(text.splitlines()), MOST_LINES)] + [
        (f".{node.name}", (node.end_lineno or 0) - node.lineno + 1, LONGEST_FUNCTION) for node in functions
    ]
    return tuple(f"{name} has {lines} lines" for name, lines, most in lengths if lines > most)


def crowding(sources: Sources) -> list[str]:
    """Few names at the top, so that a newcomer can learn them."""
    rooms = {room_of(module) for module in sources} - {HOUSE, "__main__"}
    return [f"{len(rooms)} names: {', '.join(sorted(rooms))}"] if len(rooms) > MOST_NAMES else []


# ---- the house -------------------------------------------------------------------------------------------------------


def read_house() -> dict[str, str]:
    """Source text by module name; packages by their ``__init__``."""
    texts = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        texts[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return texts


SOURCES = read_house()
LAWS: tuple[Law, ...] = (circles, meetings, steps_up, private_uses, sizes, crowding)


@pytest.mark.parametrize("law", LAWS)
def test_the_house_keeps_its_laws(law: Law) -> None:
    assert law(SOURCES) == []


def test_the_top_holds_nothing_else() -> None:
    """What ``crowding`` counts is all that lies there."""
    names = {path.name for path in ROOT.iterdir()} - {
        "__init__.py",
        "__main__.py",
        "py.typed",
        "__pycache__",
        "recipes",
    }
    assert {name.removesuffix(".py") for name in names} == {room_of(module) for module in SOURCES} - {HOUSE, "__main__"}


IN_FUNCTION = "def f() -> None:\n    "
FOR_TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    "
LONG = "def f() -> None:\n" + "    pass\n" * LONGEST_FUNCTION

# By law: a module, its text, and a part of the line that the law then gives; None: the law lets it be.
PLANTED: tuple[tuple[Law, str, str, str | None], ...] = (
    (circles, "plan", "from pipetransformer.plan import units", None),
    (circles, "plan.units", "from pipetransformer.plan.schedules import orders", None),
    (circles, "plan.units", "from pipetransformer.plan import parallel_plan", "plan.units -> pipetransformer.plan."),
    (circles, "plan.units", IN_FUNCTION + "from pipetransformer.plan import parallel_plan", None),
    (circles, "plan.units", FOR_TYPES + "from pipetransformer.plan import parallel_plan", None),
    (circles, "errors", "import pipetransformer.config.calendar", "errors"),
    (circles, "errors", "try:\n    import pipetransformer.config.calendar\nfinally:\n    pass", "errors"),
    (circles, "errors", "class A:\n    import pipetransformer.config.calendar", "errors"),
    (meetings, "freeze.planted", "from pipetransformer.dp import mesh", "freeze.planted imports"),
    (meetings, "cache.planted", IN_FUNCTION + "import pipetransformer.pipe.planner.costs", "cache.planted imports"),
    (meetings, "dp.planted", FOR_TYPES + "from pipetransformer.pipe.planner.costs import Link", "dp.planted imports"),
    (meetings, "engine.planted", "import pipetransformer.dp, pipetransformer.cache", None),
    (steps_up, "config.planted", "from pipetransformer.process import world", "config.planted imports"),
    (steps_up, "run.planted", IN_FUNCTION + "import pipetransformer.trainer", "run.planted imports"),
    (steps_up, "plan.planted", FOR_TYPES + "from pipetransformer.config import Config", "plan.planted imports"),
    (steps_up, "attic.planted", "", "attic has no place in ORDER"),
    (steps_up, "trainer", "from pipetransformer.plan import ParallelPlan", None),
    (private_uses, "run.planted", "from torch._ops import OpOverload", "torch._ops.OpOverload"),
    (private_uses, "run.planted", "import torch.utils._pytree", "torch.utils._pytree"),
    (private_uses, "run.planted", "from torch import _C", "torch._C"),
    (private_uses, "run.planted", "import torch\ntorch._foreach_norm([])", "torch._foreach_norm"),
    (private_uses, "run.planted", "import torch.distributed as d\nd._get_default_group()", "torch.distributed._get"),
    (private_uses, "run.planted", IN_FUNCTION + "from torch import nn as n; n._x", "torch.nn._x"),
    (private_uses, "run.planted", "def f(t: object) -> None: t.untyped_storage()._cdata", "_cdata"),
    (private_uses, "run.planted", "def f(t: object) -> None: t._base, t._version", "t._version"),
    (private_uses, "run.planted", "def f(op: object) -> None: op.target._schema", "_schema"),
    (private_uses, "run.planted", "def f(t: object) -> None: getattr(t, '_base')", "getattr(t, '_base')"),
    (private_uses, "run.planted", "class A:\n    def f(self) -> None: self._parameters", "self._parameters"),
    (private_uses, "run.planted", "class A:\n    def f(self) -> None:\n        self._parameters = 1", None),
    (private_uses, "run.planted", "import torch\ntorch.__version__, torch.Tensor.__add__", None),
    (private_uses, "adapter.planted", "from torch._ops import OpOverload", None),
    (sizes, "run.planted", "\n" * (MOST_LINES + 1), "run.planted has 401 lines"),
    (sizes, "run.planted", "\n" * MOST_LINES, None),
    (sizes, "run.planted", LONG, "run.planted.f has 61 lines"),
    (sizes, "run.planted", LONG.removesuffix("    pass\n"), None),
)  # fmt: skip


@pytest.mark.parametrize(("law", "module", "text", "line"), PLANTED)
def test_a_planted_violation_is_found(law: Law, module: str, text: str, line: str | None) -> None:
    name = f"{HOUSE}.{module}"
    new = set(law({**SOURCES, name: text})) - set(law(SOURCES))
    assert any(line in told for told in new) if line is not None else not new


def test_a_crowded_top_is_found() -> None:
    rooms = {f"{HOUSE}.room_{number}.x": "" for number in range(MOST_NAMES)}
    assert not crowding({HOUSE: "", f"{HOUSE}.__main__": "", **rooms})
    assert crowding({**rooms, f"{HOUSE}.one_more": ""})


# ---- without torch ---------------------------------------------------------------------------------------------------

_PROBE = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    if "torch" in sys.modules:
        sys.exit(name)
"""


def first_with_torch(modules: Iterable[str], *, path: Path) -> str:
    """The first of ``modules`` that brings torch into a fresh interpreter, which finds them in ``path``; or nothing."""
    environment = {**os.environ, "PYTHONPATH": str(path)}
    done = subprocess.run([sys.executable, "-c", _PROBE, *modules], env=environment, capture_output=True, text=True)
    return done.stderr.strip()


@pytest.mark.parametrize("room", WITHOUT_TORCH)
def test_rooms_of_plain_numbers_have_modules(room: str) -> None:
    """Else the next test would hold of nothing."""
    assert any(module.startswith(f"{HOUSE}.{room}.") for module in SOURCES)


def test_rooms_of_plain_numbers_do_not_load_torch() -> None:
    rooms = tuple(f"{HOUSE}.{room}" for room in WITHOUT_TORCH)
    modules = [module for module in SOURCES if f"{module}.".startswith(tuple(f"{room}." for room in rooms))]
    assert first_with_torch([m for m in modules if not m.endswith("__main__")], path=ROOT.parent) == ""


def test_a_planted_load_of_torch_is_found(tmp_path: Path) -> None:
    (tmp_path / "torch.py").touch()  # the real one takes seconds
    (tmp_path / "plain.py").touch()
    (tmp_path / "planted.py").write_text("import torch\n")
    assert first_with_torch(["plain"], path=tmp_path) == ""
    assert first_with_torch(["plain", "planted"], path=tmp_path) == "planted"
