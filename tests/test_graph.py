"""Models that are no chain: any cut gives the gradients, statistics and bytes that the whole model has."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from graphs import MODELS, ROWS, SMALL_ZOO, batch, build, errors, even_cut, loss, reference, traced
from ranks import RankPool
from torch import Tensor, nn

from pipetransformer.adapter import sends_without_gradients
from pipetransformer.errors import UserError
from pipetransformer.graphs.graph import Graph, GraphPipeline, GraphStage, checks, profile_graph, trace
from pipetransformer.process.world import World

EXACT = 1e-10


def run_apart(stages: list[GraphStage], names: tuple[str, ...], inputs: tuple[Tensor, ...], target: Tensor) -> Tensor:
    """One micro-batch through stages that share no autograd graph, as on several ranks."""
    named = dict(zip(names, inputs))
    received: list[tuple[Tensor, ...]] = []
    sent: list[tuple[Tensor, ...]] = []
    for number, stage in enumerate(stages):
        wanted = stage.spec.inputs
        given = (
            tuple(t.detach().clone().requires_grad_(w.requires_grad) for t, w in zip(sent[-1], wanted))
            if sent
            else inputs
        )
        output = stage(*given, **({n: named[n] for n in stage.spec.model_inputs} if number else {}))
        received.append(given)
        sent.append(output if isinstance(output, tuple) else (output,))
        described = [(t.name, t.shape, t.dtype, t.requires_grad) for t in stage.spec.outputs]
        made = [(n, tuple(t.shape), t.dtype, t.requires_grad) for (n, *_), t in zip(described, sent[-1])]
        assert made == described
    value = loss(sent[-1][0], target)
    value.backward()
    for outputs, given in reversed(list(zip(sent[:-1], received[1:]))):
        tracked = [(output, leaf.grad) for output, leaf in zip(outputs, given) if output.requires_grad]
        torch.autograd.backward([t for t, _ in tracked], [torch.zeros_like(t) if g is None else g for t, g in tracked])
    return value.detach()


@pytest.mark.parametrize("name", MODELS)
def test_every_cut_gives_the_model_s_gradients_and_statistics(name: str) -> None:
    """Stages of one process share tied weights, so autograd sums those itself."""
    _, graph = traced(name)
    assert graph.num_units >= 8
    data, target = batch(name, num_microbatches=2)
    expected = reference(build(name), data, target, num_microbatches=2)
    choice = random.Random(0)
    cuts = [(cut,) for cut in range(1, graph.num_units)]
    cuts += [tuple(sorted(choice.sample(range(1, graph.num_units), 3))) for _ in range(4)]
    state = copy.deepcopy(build(name).state_dict())
    model, graph = traced(name)
    for boundaries in [(), tuple(range(1, graph.num_units)), *cuts]:
        model.load_state_dict(state)
        model.zero_grad()
        stages = [GraphStage(graph, units.start, units.stop) for units in graph.stages(boundaries)]
        values = [
            run_apart(stages, graph.input_names, (part,), goal) for part, goal in zip(data.chunk(2), target.chunk(2))
        ]
        for stage in stages:
            stage.commit_statistics()
        torch.testing.assert_close(torch.stack(values), expected.losses, rtol=EXACT, atol=0)
        found = errors(model, expected)
        assert max(found.values()) < EXACT, (boundaries, found)


def trains(world: World, name: str, cases: list[tuple[str, int]]) -> list[dict[str, Any]]:
    """One mini-batch for every (schedule, micro-batches) on as many stages as ranks."""
    results = []
    model, graph = traced(name)
    state = copy.deepcopy(model.state_dict())
    for kind, num_microbatches in cases:
        data, target = batch(name, num_microbatches=num_microbatches)
        model.load_state_dict(state)
        model.zero_grad()
        expected = reference(model, data, target, num_microbatches=num_microbatches)
        pipeline = GraphPipeline(
            graph,
            boundaries=even_cut(graph, world.size),
            num_microbatches=num_microbatches,
            kind=kind,
            loss=loss,
            group=dist.group.WORLD,
        )
        (stage,) = pipeline.stages
        held = {key: bool(torch.equal(value, state[key])) for key, value in stage.state_dict().items()}
        pipeline.train((data,), target)  # the first step may send more, to set up
        model.load_state_dict(state)
        stage.zero_grad()
        with _SentBytes() as sent:
            losses = pipeline.train((data,), target)
        spec = stage.spec
        returned = sum(t.num_bytes for t in spec.inputs if t.requires_grad)
        tied = [n for n, stages in graph.tied(even_cut(graph, world.size)) if world.rank in stages]
        assert pipeline.is_last == (losses is not None)
        if losses is not None:
            torch.testing.assert_close(losses, expected.losses, rtol=EXACT, atol=0)
        results.append(
            {
                "errors": errors(stage, expected),
                "held": held,
                "sent": sent.count,
                "expected": num_microbatches * (sum(t.num_bytes for t in spec.outputs) + returned)
                + sum(graph.program.tensors[n].tensor.nbytes for n in tied),
                "tied": tied,
            }
        )
    return results


class _SentBytes:
    """Counts what point-to-point operations send while inside."""

    def __enter__(self) -> _SentBytes:
        self.count = 0
        self._patch = pytest.MonkeyPatch()
        made = dist.P2POp.__init__

        def counted(operation: dist.P2POp, op: Any, tensor: Tensor, *args: Any, **options: Any) -> None:
            self.count += tensor.nbytes if op is dist.isend else 0
            made(operation, op, tensor, *args, **options)

        self._patch.setattr(dist.P2POp, "__init__", counted)
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_stages_on_ranks_give_the_model_s_gradients(ranks: RankPool, name: str, num_stages: int) -> None:
    cases = [("gpipe", 2), ("1f1b", 4)] if num_stages == 3 else [("gpipe", 4), ("1f1b", 2)]
    if name == "without gradients" and not sends_without_gradients():
        pytest.skip("stages of this version of torch cannot send tensors that have no gradient")
    by_rank = ranks.run(num_stages, trains, name, cases)
    for number in range(len(cases)):
        results = [result[number] for result in by_rank]
        for result in results:
            assert max(result["errors"].values()) < EXACT, result["errors"]
            assert all(result["held"].values())
            assert result["sent"] == result["expected"]
        assert {key for result in results for key in result["held"]} == set(build(name).state_dict())
        # A tied weight is on the first and the last stage, and only "tied" has one.
        ends = (0, num_stages - 1) if name == "tied" else ()
        assert [bool(result["tied"]) for result in results] == [stage in ends for stage in range(num_stages)]


@pytest.mark.full
@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("name", [*MODELS, *SMALL_ZOO])
def test_all_models_and_schedules(ranks: RankPool, name: str, num_stages: int) -> None:
    cases = [("gpipe", 2), ("gpipe", 4), ("1f1b", 2), ("1f1b", 4)]
    cases = [case for case in cases if case[0] == "gpipe" or case[1] >= num_stages]
    if name == "without gradients" and not sends_without_gradients():
        pytest.skip("stages of this version of torch cannot send tensors that have no gradient")
    for results in ranks.run(num_stages, trains, name, cases, timeout=300):
        for result in results:
            assert max(result["errors"].values()) < EXACT, result["errors"]
            assert result["sent"] == result["expected"]


def test_nothing_flows_backwards_and_edges_are_all_that_is_used() -> None:
    for name in MODELS:
        _, graph = traced(name)
        assert [unit.first for unit in graph.units] == [0, *(unit.stop for unit in graph.units[:-1])]
        assert all(t.producer < min(t.consumers) for t in graph.tensors)
        made = [tensor.producer for tensor in graph.tensors]
        assert made == sorted(made)
        boundaries = even_cut(graph, 4)
        edges = graph.edges(boundaries)
        assert all(edge.producer < edge.consumer for edge in edges)
        # Relaying sends a tensor once for every cut between its producer and its last consumer.
        far = {e.name: max(f.consumer for f in edges if f.name == e.name) - e.producer for e in edges}
        num_bytes = {tensor.name: tensor.num_bytes for tensor in graph.tensors}
        assert sum(map(graph.crossing_bytes, boundaries)) == sum(num_bytes[n] * distance for n, distance in far.items())


def test_side_computations_and_inputs_are_never_sent() -> None:
    _, graph = traced("tied")
    hidden = ROWS * 6 * 8 * 8  # bytes of [rows, tokens, width] in float64
    blocks = [cut for cut in range(1, graph.num_units) if graph.units[cut].name.endswith("norm")]
    assert len(blocks) == 4
    assert all(graph.crossing_bytes(cut) == hidden for cut in blocks)
    _, graph = traced("long skips")
    assert graph.units[-3].operators == ("cat",)  # of the last level and the model's input
    assert graph.crossing_bytes(graph.num_units - 3) == ROWS * 4 * 8 * 8 * 8


def test_a_version_that_cannot_send_what_has_no_gradient_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "sends_without_gradients", lambda: False)
    _, graph = traced("without gradients")
    options: dict[str, Any] = {"num_microbatches": 2, "kind": "gpipe", "loss": loss, "group": None}
    with pytest.raises(UserError, match="argmax, which has no gradient"):
        GraphPipeline(graph, boundaries=(2,), **options)
    GraphPipeline(graph, boundaries=(), **options)


def test_depth_gives_coarser_units() -> None:
    names = [unit.name for unit in traced("residual", depth=1)[1].units]
    assert names == ["stem", "blocks.0", "blocks.1", "blocks.2", "ResidualNet", "head"]
    names = [unit.name for unit in traced("residual", depth=2)[1].units]
    assert names[:4] == ["stem.0", "stem.1", "blocks.0.conv1", "blocks.0.norm1"]


def test_calls_of_one_module_are_units_of_their_own_and_share_its_weight() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

        def forward(self, rows: Tensor) -> Tensor:
            return self.cell(self.cell(self.cell(rows)))

    graph = trace(Recurrent(), (torch.ones(2, 4),), depth=1)
    assert [unit.name for unit in graph.units] == ["cell", "cell#2", "cell#3"]
    assert graph.tied((1, 2)) == (("cell.0.weight", (0, 1, 2)), ("cell.0.bias", (0, 1, 2)))


def test_memory_changed_in_place_is_never_cut_before_its_last_change() -> None:
    _, graph = traced("residual")
    for unit in graph.units:
        assert unit.operators[0] not in ("relu_", "add_")


def test_a_tied_weight_has_all_its_names() -> None:
    model, graph = traced("tied")
    ((name, stages),) = graph.tied(even_cut(graph, 3))
    assert (name, stages) == ("tokens.weight", (0, 2))
    last = GraphStage(graph, graph.num_units - 1, graph.num_units)
    assert dict(last.named_parameters(remove_duplicate=False)).keys() == {"tokens.weight", "head.weight"}
    assert last.get_parameter("head.weight") is model.get_parameter("tokens.weight")


def test_evaluation_uses_running_statistics_and_drops_nothing() -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = build("residual")
            self.drop = nn.Dropout(0.5)

        def forward(self, images: Tensor) -> Tensor:
            return self.drop(self.body(images))

    model = Dropping()
    data, target = batch("residual", num_microbatches=2)
    graph = trace(model, (data[:ROWS],))
    pipeline = GraphPipeline(graph, boundaries=(), num_microbatches=2, kind="gpipe", loss=loss, group=None)
    assert not torch.equal(pipeline.stages[0](data[:ROWS]), pipeline.stages[0](data[:ROWS]))
    pipeline.stages[0].discard_statistics()
    pipeline.train((data,), target)
    output = pipeline.evaluate((data,))
    assert output is not None
    torch.testing.assert_close(output, model.eval()(data), rtol=EXACT, atol=EXACT)


def evaluates(world: World) -> Tensor | None:
    model, graph = traced("residual")
    data, target = batch("residual", num_microbatches=2)
    pipeline = GraphPipeline(
        graph, boundaries=even_cut(graph, 2), num_microbatches=2, kind="1f1b", loss=loss, group=dist.group.WORLD
    )
    pipeline.train((data,), target)
    return pipeline.evaluate((data,))


def test_evaluation_over_ranks(ranks: RankPool) -> None:
    model, graph = traced("residual")
    data, target = batch("residual", num_microbatches=2)
    whole = GraphPipeline(graph, boundaries=(), num_microbatches=2, kind="gpipe", loss=loss, group=None)
    whole.train((data,), target)
    first, last = ranks.run(2, evaluates)
    assert first is None
    torch.testing.assert_close(last, model.eval()(data), rtol=EXACT, atol=EXACT)


def test_profile_accounts_for_all_bytes_and_leaves_no_trace() -> None:
    model, graph = traced("residual")
    data, _ = batch("residual", num_microbatches=1)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    for recompute in (False, True):
        costs = profile_graph(graph, (data,), repeats=2, recompute=recompute)
        assert len(costs.forward_ns) == len(costs.crossing_bytes) == graph.num_units
        assert min(costs.forward_ns) > 0 and min(costs.backward_ns) > 0
        assert all((ns > 0) == recompute for ns in costs.recompute_ns)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert costs.crossing_bytes[:-1] == tuple(graph.crossing_bytes(cut) for cut in range(1, graph.num_units))
    for boundaries in [(), even_cut(graph, 2), even_cut(graph, 3)]:
        assert _kept(graph, boundaries, data) == [costs.kept_bytes(u.start, u.stop) for u in graph.stages(boundaries)]


def _kept(graph: Graph, boundaries: tuple[int, ...], data: Tensor) -> list[int]:
    """By stage: bytes of what it receives, and of other storages that autograd keeps."""
    weights = {state.tensor.untyped_storage().data_ptr() for state in graph.program.tensors.values()}
    sent: tuple[Tensor, ...] = (data,)
    counts = []
    for units in graph.stages(boundaries):
        given = tuple(t.detach().clone() for t in sent)
        given = tuple(t.requires_grad_(units.start > 0) for t in given)
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in given}

        def pack(tensor: Tensor, storages: dict[int, Any] = storages) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                storages[storage.data_ptr()] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = GraphStage(graph, units.start, units.stop)(*given)
        counts.append(sum(storage.nbytes() for storage in storages.values()))
        sent = output if isinstance(output, tuple) else (output,)
    return counts


class _Branches(nn.Module):
    def forward(self, rows: Tensor) -> Tensor:
        return rows * 2 if rows.sum() > 0 else rows


class _Picks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.linear(rows)
        return hidden[hidden > 0]


class _Overwrites(nn.Module):
    def forward(self, rows: Tensor) -> Tensor:
        return rows.relu_()


@pytest.mark.parametrize(
    ("model", "named"),
    [(_Branches(), "if rows.sum() > 0"), (_Picks(), "aten."), (_Overwrites(), "changes its input rows in place")],
)
def test_models_that_cannot_be_cut_are_one_line(
    model: nn.Module, named: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError) as caught:
        trace(model, (torch.ones(2, 4),))
    line = str(caught.value)
    assert "\n" not in line
    assert named in line and type(model).__name__ in line
    assert capfd.readouterr() == ("", "")


def test_a_failure_inside_torch_names_no_line_of_ours() -> None:
    """No line of the model's is to blame: the layer's sizes are."""
    with pytest.raises(UserError) as caught:
        trace(nn.Sequential(nn.Linear(8, 4)), (torch.ones(2, 4),))
    assert "line `" not in str(caught.value) and ".py" not in str(caught.value)
    assert str(caught.value).startswith("unexportable model: Sequential fails at aten.")


def test_modes_and_weights_are_left_alone() -> None:
    model = build("residual").eval()
    before = copy.deepcopy(model.state_dict())
    graph = trace(model, (batch("residual", num_microbatches=1)[0],))
    assert not any(module.training for module in model.modules())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert any("batch_norm" in unit.operators for unit in graph.units)
    with pytest.raises(UserError, match="empty; give ascending ones from 1 to "):
        graph.stages((3, 3))


class _Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.linear(inputs).transpose(1, 2)
        return result


def test_outputs_are_told_with_their_strides() -> None:
    """Torch may compare the last stage's with what the schedule was built for."""
    model, inputs = _Turned(), torch.zeros(2, 4, 3)
    (told,), real = trace(model, (inputs,), depth=1).output_examples(), model(inputs)
    assert (told.shape, told.stride(), told.dtype) == (real.shape, real.stride(), real.dtype)
