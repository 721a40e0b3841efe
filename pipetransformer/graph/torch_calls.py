"""Every private or version-dependent call into torch of this package, each with its reason (see ``adapter``)."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

# Note: tensors without data have no public name.
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, _utils
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.export import ExportedProgram

__all__ = [
    "SENDS_WITHOUT_GRADIENTS",
    "aliases",
    "build_graph_schedule",
    "export",
    "export_failure",
    "has_random_tag",
    "is_light",
    "module_call",
    "requires_grad",
    "written",
]

# Note: stages of torch 2.11 take all that they receive to have a gradient; later ones look, in metadata of their own.
SENDS_WITHOUT_GRADIENTS = hasattr(_utils, "_StageMeta")


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


def export_failure(error: BaseException) -> tuple[str, str, str]:
    """(operator, place, reason) of what ``export`` raised, each possibly empty.

    Note: torch.export has no exception that names them: the operator is what the innermost dispatch frame was called
    with, the place is the innermost line outside torch.
    """
    operator, place = "", ""
    packages = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    source: BaseException | None = error
    while source is not None and not place:
        for frame, line in traceback.walk_tb(source.__traceback__):
            called = frame.f_locals.get("func")
            if isinstance(called, torch._ops.OpOverload):
                operator = str(called)
            summary = traceback.FrameSummary(frame.f_code.co_filename, line, frame.f_code.co_name)
            if summary.line and not summary.filename.startswith(packages):
                place = f"{summary.line} ({Path(summary.filename).name}:{line})"
        source = source.__cause__ or source.__context__
    lines = [text.strip() for text in str(error).splitlines() if text.strip()]
    return operator, place, lines[0] if lines else type(error).__name__


def module_call(node: fx.Node, depth: int | None) -> tuple[str, str] | None:
    """Where ``node`` was called: qualified name of the innermost module, cut after ``depth`` levels, and which of its
    calls that was. None where the exporter made the node.

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


def _schema(node: fx.Node) -> Any:
    """Note: an operator's schema is the only place that tells what it changes and what it aliases."""
    return node.target._schema if isinstance(node.target, torch._ops.OpOverload) else None


def _marked(node: fx.Node, marks: Callable[[Any], bool]) -> Iterator[fx.Node]:
    """Nodes given for those arguments of ``node`` whose alias annotation satisfies ``marks``."""
    for position, argument in enumerate(_schema(node).arguments):
        if argument.alias_info is not None and marks(argument.alias_info):
            given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            yield from (value for value in (given if isinstance(given, (list, tuple)) else (given,)) if _is_node(value))


def _is_node(value: object) -> bool:
    return isinstance(value, fx.Node)


def written(node: fx.Node) -> tuple[fx.Node, ...]:
    """What ``node`` changes in place. An operator without a schema (one with a subgraph) is taken to change nothing
    unless its subgraph does; then everything that it is given."""
    if _schema(node) is not None:
        return tuple(_marked(node, lambda info: bool(info.is_write)))
    for source in node.all_input_nodes:
        subgraph = getattr(node.graph.owning_module, source.target) if source.op == "get_attr" else None  # type: ignore[arg-type]
        if isinstance(subgraph, fx.GraphModule) and any(
            inner.op == "call_function" and written(inner) for inner in subgraph.graph.nodes
        ):
            return tuple(node.all_input_nodes)
    return ()


def aliases(node: fx.Node) -> tuple[fx.Node, ...]:
    """What the value of ``node`` may share memory with: the arguments that it is a view of or returns."""
    if _is_getitem(node) or node.target in _RETURNS_INPUT:
        return tuple(node.all_input_nodes)
    if _schema(node) is None:
        return ()
    return tuple(_marked(node, lambda info: True))


def has_random_tag(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def is_light(node: fx.Node) -> bool:
    """Whether ``node`` only reshapes, picks from a tuple or works element by element."""
    if _schema(node) is None:
        return _is_getitem(node)
    return torch.Tag.pointwise in node.target.tags or node.target in _RETURNS_INPUT or bool(aliases(node))  # type: ignore[union-attr]


def _is_getitem(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


# Note: their schema shows no alias, but without anything to drop they return what they were given.
_RETURNS_INPUT = (
    torch.ops.aten.dropout.default,
    torch.ops.aten.feature_dropout.default,
    torch.ops.aten.alpha_dropout.default,
    torch.ops.aten.feature_alpha_dropout.default,
)


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


def build_graph_schedule(
    module: nn.Module,
    *,
    kind: str,
    stage: int,
    num_stages: int,
    num_microbatches: int,
    example_inputs: Sequence[Tensor],
    example_outputs: Sequence[Tensor],
    loss: Callable[[Any, Tensor], Tensor] | None,
    group: dist.ProcessGroup,
    device: torch.device,
) -> PipelineScheduleSingle:
    """A schedule over one static-shape stage that takes and gives several tensors; ``loss`` None: forward only.

    Note: see ``adapter.build_schedule``, of which this is the form for several tensors a boundary.
    """
    pipeline_stage = PipelineStage(
        module,
        stage,
        num_stages,
        device,
        input_args=tuple(example_inputs),
        output_args=tuple(example_outputs),
        group=group,
    )
    schedule = ScheduleGPipe if kind == "gpipe" or loss is None else Schedule1F1B
    return schedule(pipeline_stage, num_microbatches, loss_fn=loss, scale_grads=False)
