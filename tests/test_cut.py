"""Cuts by what parts take where they run, and costs of a graph's units that are kept."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipetransformer.graphs.analysis import cut
from pipetransformer.graphs.analysis.ftpipe import PartTimes
from pipetransformer.graphs.analysis.parts import Samples
from pipetransformer.graphs.analysis.report import analyse
from pipetransformer.graphs.graph import Edge, GraphCosts
from pipetransformer.graphs.graph.profile_file import kept_costs
from pipetransformer.pipe.planner.costs import Link
from pipetransformer.pipe.planner.step_simulator import StageCosts, simulate


def costs_of(forward_ms: Sequence[int]) -> GraphCosts:
    nothing = (0,) * len(forward_ms)
    return GraphCosts(tuple(ms * 10**6 for ms in forward_ms), *[nothing] * 6, shared=((0, 1, 8),))


class Machine:
    """A graph's parts, as they run. Args: forward_ms: by unit."""

    def __init__(self, forward_ms: Sequence[int]) -> None:
        self.tried: list[tuple[int, ...]] = []
        self._until = [0, *accumulate(forward_ms)]

    def stages(self, boundaries: Sequence[int]) -> list[range]:
        return [range(*pair) for pair in pairwise((0, *boundaries, len(self._until) - 1))]

    def time_parts(self, graph: object, boundaries: tuple[int, ...], *_: object, **__: object) -> Any:
        self.tried.append(boundaries)
        taken = [float(self._until[part.stop] - self._until[part.start]) for part in self.stages(boundaries)]
        return [Samples((ms,)) for ms in taken], [Samples((0.0,))] * len(taken)


def test_a_cut_follows_what_its_parts_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units measured alike, of which the last three take a fifth where they run as a part."""
    machine = Machine([10, 10, 10, 2, 2, 2])
    monkeypatch.setattr(cut, "time_parts", machine.time_parts)
    measured = costs_of([10] * 6)
    boundaries, found = cut.measured_cut(
        SimpleNamespace(stages=machine.stages),  # type: ignore[arg-type]
        (),
        measured,
        num_stages=2,
        link=Link(0, 0.0),
        recompute=False,
    )
    assert machine.tried == [(3,), (2,)] and boundaries == (2,)
    # The mean of 10, 10, 10, 2, 2, 2 and of 10, 10, 4, 4, 4, 4.
    assert found.forward_ns == tuple(ms * 10**6 for ms in (10, 10, 7, 3, 3, 3))


def test_trials_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the machine is never the same, and every trial gives another cut."""
    machine, slow = Machine([1] * 40), iter(range(5, 100, 5))
    monkeypatch.setattr(cut, "time_parts", lambda *given, **named: Machine.time_parts(drifting(), *given, **named))

    def drifting() -> Machine:
        at = next(slow) % 40
        drifted = Machine([1] * at + [1000] * (40 - at))
        drifted.tried = machine.tried
        return drifted

    cut.measured_cut(
        SimpleNamespace(stages=machine.stages),  # type: ignore[arg-type]
        (),
        costs_of([1] * 40),
        num_stages=2,
        link=Link(0, 0.0),
        recompute=False,
    )
    assert 1 < len(machine.tried) <= 5


def test_costs_are_kept_by_their_key(tmp_path: Path) -> None:
    measured: list[int] = []

    def costs(ms: int) -> GraphCosts:
        measured.append(ms)
        return costs_of([ms, ms])

    keys: list[dict[str, object]] = [{"model": "gpt2", "shape": [1, 8]}, {"model": "gpt2", "shape": [1, 16]}]
    first = kept_costs(keys[0], folder=tmp_path, measure=lambda: costs(1))
    assert kept_costs(keys[0], folder=tmp_path, measure=lambda: costs(2)) == first == costs_of([1, 1])
    assert kept_costs(keys[1], folder=tmp_path, measure=lambda: costs(3)) == costs_of([3, 3])
    for file in tmp_path.iterdir():
        file.write_text("{")
    assert kept_costs(keys[0], folder=tmp_path, measure=lambda: costs(4)) == costs_of([4, 4])
    assert measured == [1, 3, 4]


def test_costs_of_units_are_kept_apart_by_all_that_they_depend_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[bool] = []

    def profile_graph(graph: object, inputs: object, *, repeats: int, recompute: bool) -> GraphCosts:
        measured.append(recompute)
        return costs_of([1, 1])

    monkeypatch.setattr(cut, "profile_graph", profile_graph)
    graph: Any = SimpleNamespace(units=[SimpleNamespace(name="a"), SimpleNamespace(name="b")])
    for rows, recompute, model in [(2, False, "x"), (2, False, "x"), (2, True, "x"), (3, True, "x"), (3, True, "y")]:
        key = {"model": model}
        cut._unit_costs(graph, (torch.ones(rows, 4),), recompute=recompute, key=key, profiles=tmp_path)
    assert measured == [False, True, True, True]
    cut._unit_costs(graph, (torch.ones(2, 4),), recompute=False, key={"model": "x"}, profiles=None)
    assert measured == [False, True, True, True, False]


def test_a_report_tells_sums_from_longest_paths_and_sends_from_gradients() -> None:
    """Two parts, of units 0 and 1, which are independent, and of unit 2, which needs both."""
    tensors = [SimpleNamespace(producer=0, consumers=(2,)), SimpleNamespace(producer=1, consumers=(2,))]
    graph: Any = SimpleNamespace(
        num_units=3,
        units=[SimpleNamespace(name=name) for name in "abc"],
        tensors=tensors,
        stages=lambda boundaries: (range(2), range(2, 3)),
        edges=lambda boundaries: (Edge(0, 1, "a", 6), Edge(0, 1, "b", 4)),
    )
    ms, none = 10**6, (0, 0, 0)
    costs = GraphCosts(
        forward_ns=(2 * ms, 3 * ms, 4 * ms),
        recompute_ns=(1 * ms, 1 * ms, 1 * ms),
        backward_ns=(6 * ms, 1 * ms, 2 * ms),
        activation_bytes=none,
        parameter_bytes=(8, 4, 2),
        crossing_bytes=(6, 10, 0),
        returned_bytes=(6, 4, 0),
        shared=(),
    )
    report = analyse(
        graph, (2,), costs=costs, in_parts=costs, forward=[Samples((5.0,)), Samples((4.0,))],
        backward=[Samples((9.0,)), Samples((3.0,))], link=Link(0, 1e6), recompute=True, num_microbatches=2,
        title="", device="", num_parameters=0,
    )  # fmt: skip
    assert report.sequential == PartTimes((5.0, 4.0), (9.0, 3.0))
    assert report.parallel == PartTimes((3.0, 4.0), (7.0, 3.0))
    assert report.weight_bytes == (12, 2) and report.activation_bytes == (0, 10)
    stages = [
        StageCosts(5 * ms, 9 * ms, send=10 * ms, send_back=0),
        StageCosts(4 * ms, 3 * ms, send=0, send_back=4 * ms),
    ]
    step = simulate("1f1b", stages, num_ranks=2, num_microbatches=2, latency=0)
    assert report.bubble == step.bubble and report.speed_up == 2 * 21 * ms / step.compute
