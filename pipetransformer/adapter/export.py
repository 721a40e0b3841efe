"""torch.export: a model's training graph, the reason where there is none, and the exporter's notes on operators."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

# Note: tensors without data have no public name.
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram


def export(model: nn.Module, example: tuple[Tensor, ...]) -> ExportedProgram:
    """The training graph of ``model`` for the shapes of ``example``; raises whatever torch.export raises.

    Note: ``strict=False`` runs the model's Python as it is; it is not the default everywhere. The graph that comes out
    is the training one: in-place changes, dropout and ``batch_norm(training=True)`` are as the model wrote them. Where
    it fails it prints the graph so far and logs a traceback beside the error that it raises.
    """
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()), _no_logging():
        return torch.export.export(model, example, strict=False)


@contextmanager
def _no_logging() -> Iterator[None]:
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(disabled)


def export_failure(error: BaseException, *, calls_from: Path) -> tuple[str, str, str]:
    """(operator, place, reason) of what ``export`` raised, each possibly empty.

    Args:
        calls_from: the folder whose code called ``export``; no line of it is the place.

    Note: torch.export has no exception that names them: the operator is what the innermost dispatch frame was called
    with, the place is the innermost line outside torch and what calls it here.
    """
    operator, place = "", ""
    not_the_model = (Path(torch.__file__).parent, Path(__file__).parent, calls_from)
    source: BaseException | None = error
    while source is not None and not place:
        for frame, line in traceback.walk_tb(source.__traceback__):
            called = frame.f_locals.get("func")
            if isinstance(called, torch._ops.OpOverload):
                operator = str(called)
            summary = traceback.FrameSummary(frame.f_code.co_filename, line, frame.f_code.co_name)
            if summary.line and not any(map(Path(summary.filename).is_relative_to, not_the_model)):
                place = f"{summary.line} ({Path(summary.filename).name}:{line})"
        source = source.__cause__ or source.__context__
    lines = [text.strip() for text in str(error).splitlines() if text.strip()]
    return operator, place, lines[0] if lines else type(error).__name__


def module_call(node: fx.Node, depth: int | None) -> tuple[str, str] | None:
    """The innermost module that called ``node``: its qualified name, cut after ``depth`` levels, and the number of the
    call. None where the exporter made the node.

    Note: the stack has the path of every module around the call, outermost first, under a key that ends with "@1" and
    so on where it is called again.
    """
    stack: Mapping[str, tuple[str, Any]] | None = node.meta.get("nn_module_stack")
    if not stack:
        return None
    called = [path for path, _ in stack.values()]
    path = _cut_path(called[-1], depth, called=called)
    call = next((key.partition("@")[2] for key, (entered, _) in stack.items() if entered == path), "")
    return path, call


def block_call(node: fx.Node) -> tuple[str, str] | None:
    """The outermost module around ``node`` that is one of a list or sequence: its qualified name and the number of the
    call; both empty where there is none. None where the exporter made the node."""
    stack: Mapping[str, tuple[str, Any]] | None = node.meta.get("nn_module_stack")
    if not stack:
        return None
    members = ((path, key.partition("@")[2]) for key, (path, _) in stack.items() if path.split(".")[-1].isdigit())
    return next(members, ("", ""))


def _cut_path(path: str, depth: int | None, *, called: Sequence[str]) -> str:
    """The first ``depth`` levels of ``path``. A module of a list is one level with it, as h.0: a list is never called,
    as a sequence of layers is."""
    levels: list[str] = []
    for name in path.split("."):
        if name.isdigit() and levels and ".".join(levels) not in called:
            levels[-1] += f".{name}"
        else:
            levels.append(name)
    return ".".join(levels[:depth])


def requires_grad(graph: fx.GraphModule, needed: Mapping[fx.Node, bool]) -> dict[fx.Node, bool]:
    """For every tensor-valued node: whether autograd tracks it, found by running the graph without data.

    Args:
        needed: by placeholder, whether it requires gradients.

    Note: the exporter's own metadata do not tell, and rules by operator are wrong for ``detach``, ``zeros_like`` and
    regions without gradients.
    """
    found: dict[fx.Node, bool] = {}

    class _Recorder(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            value = super().run_node(n)
            if isinstance(value, Tensor):
                found[n] = value.requires_grad
            return value

    with FakeTensorMode(), torch.enable_grad():
        arguments = []
        for node, tracked in needed.items():
            value = node.meta["val"]
            like = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
            arguments.append(like.requires_grad_(tracked))
        _Recorder(graph).run(*arguments)
    return found
