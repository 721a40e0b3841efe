"""Cuts by what parts take where they run, and costs of a graph's units that are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.balance.__main__ import row_of
from pipetransformer.graphs.analysis import cut
from pipetransformer.graphs.analysis.ftpipe import PartTimes, imbalance
from pipetransformer.graphs.analysis.parts import Samples
from pipetransformer.graphs.analysis.printout import printout
from pipetransformer.graphs.analysis.report import PartitionReport, analyse
from pipetransformer.graphs.graph import Edge, GraphCosts
from pipetransformer.graphs.graph.profile_file import kept_costs
from pipetransformer.graphs.zoo import ZOO
from pipetransformer.pipe.planner.costs import Link
from pipetransformer.pipe.planner.step_simulator import StageCosts, simulate

MS = 10**6


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


def report_of(**changes: Any) -> PartitionReport:
    """Two parts, of units 0 and 1, whose work is independent, and of unit 2, which needs both."""
    graph: Any = SimpleNamespace(
        num_units=3,
        units=[SimpleNamespace(name=name) for name in "abc"],
        stages=lambda boundaries: (range(2), range(2, 3)),
        edges=lambda boundaries: (Edge(0, 1, "a", 6), Edge(0, 1, "b", 4)),
        work_needs=lambda: (frozenset(), frozenset(), frozenset({0, 1})),
        input_shapes=((4, 3),),
        input_dtypes=(torch.int64,),
        output_examples=lambda: [torch.empty(5, 2, device="meta")],
    )
    given: dict[str, Any] = {
        **{"costs": COSTS, "before": COSTS, "in_parts": COSTS, "link": Link(0, 1e6), "recompute": True},
        **{"forward": [Samples((5.0,)), Samples((4.0,))], "backward": [Samples((9.0,)), Samples((3.0,))]},
        **{"num_microbatches": 2, "title": "", "device": "", "source": "", "num_parameters": 0},
    }
    return analyse(graph, (2,), **{**given, **changes})


COSTS = GraphCosts(
    forward_ns=(2 * MS, 3 * MS, 4 * MS),
    recompute_ns=(1 * MS, 1 * MS, 1 * MS),
    backward_ns=(6 * MS, 1 * MS, 2 * MS),
    activation_bytes=(0, 0, 0),
    parameter_bytes=(8, 4, 2),
    crossing_bytes=(6, 10, 0),
    returned_bytes=(6, 4, 0),
    shared=(),
)


def test_a_report_tells_sums_from_longest_paths_and_sends_from_gradients() -> None:
    report = report_of()
    assert report.sequential == PartTimes((5.0, 4.0), (9.0, 3.0))
    assert report.parallel == PartTimes((3.0, 4.0), (7.0, 3.0))
    assert report.weight_bytes == (12, 2) and report.activation_bytes == (0, 10)
    stages = [
        StageCosts(5 * MS, 9 * MS, send=10 * MS, send_back=0),
        StageCosts(4 * MS, 3 * MS, send=0, send_back=4 * MS),
    ]
    step = simulate("1f1b", stages, num_ranks=2, num_microbatches=2, latency=0)
    assert report.bubble == step.bubble and report.speed_up == 2 * 21 * MS / step.compute


def test_a_balance_is_judged_by_rounds_before_its_own() -> None:
    """Rounds in which part 1 was slowed are no reason why a cut could not have been better: the bound stays."""
    before, disturbed = costs_of([6, 6, 6]), costs_of([6, 6, 24])
    times = {"forward": [Samples((12.0,)), Samples((24.0,))], "backward": [Samples((0.0,)), Samples((0.0,))]}
    report = report_of(before=before, in_parts=disturbed, **times)
    assert (report.bound, report.bound_of_rounds) == (0.5, 0.5)
    report = report_of(before=costs_of([5, 5, 10]), in_parts=disturbed, **times)
    assert (report.bound, report.bound_of_rounds) == (1.0, 0.5)
    assert "real imbalance forward + backward 0.5000; the best of any cut of these units was 1.0000 by the rounds" in (
        printout(report, labels="gpt2")
    )


def test_the_benchmark_judges_a_balance_by_rounds_before_its_own() -> None:
    times = {"forward": [Samples((12.0, 8.0)), Samples((24.0, 8.0))], "backward": [Samples((0.0, 0.0))] * 2}
    report = report_of(before=costs_of([5, 5, 10]), in_parts=costs_of([5, 5, 16]), **times)
    row = row_of(report, "amoebanet_4x512_c10")
    assert (row["balance"], row["bound"], row["of bound"]) == (0.625, 1.0, 0.625)
    assert (row["by these rounds"], row["spread"], row["FTPipe"]) == (0.625, "0.500 .. 1.000", None)


def analysed(monkeypatch: pytest.MonkeyPatch, model: str, example: Tensor, **small: Any) -> tuple[Any, Any]:
    """A real model's report of two parts, of which no time is measured: its units took 1 ms each before, its parts 3
    and 30 ms in the reported rounds."""
    monkeypatch.setattr(cut, "_unit_costs", lambda graph, *_, **__: costs_of([1] * graph.num_units))
    monkeypatch.setattr(cut, "measured_cut", lambda graph, *_, **__: ((3,), costs_of([1] * graph.num_units)))
    taken = [Samples((3.0,)), Samples((30.0,))]
    monkeypatch.setattr(cut, "time_parts", lambda *_, **__: (taken, taken))
    return cut.analyse_model(
        replace(ZOO[model], build=partial(ZOO[model].build, **small)), example=example, num_stages=2, iterations=1,
        depth=2, recompute=False, memory_limit=None, num_microbatches=4, link=Link(0, 0.0), title="", source="",
        profiles=None,
    )  # fmt: skip


def test_the_bound_of_a_model_is_that_of_its_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the reported rounds, of which part 1 takes ten times as long, bring other costs."""
    model = ZOO["gpt2_90m"]
    example = model.example(batch_size=1, seed=0, **model.small_input)
    report, graph = analysed(monkeypatch, model.name, example, **model.small)
    first = graph.num_units // 2
    assert report.bound == first / (graph.num_units - first)
    assert imbalance(report.real.both) == 0.1 and report.bound_of_rounds not in (0.1, report.bound)


@pytest.mark.parametrize(
    ("model", "batch_size", "small", "given", "out"),
    [
        ("amoebanet_4x512_c10", 4, {"num_layers": 3, "num_filters": 16}, 2.408448, 0.00016),
        ("gpt2", 1, {"num_layers": 1, "width": 32, "num_heads": 4}, 0.008192, 1024 * 50257 * 4 / 1e6),
    ],
)
def test_a_models_own_input_and_output_have_the_originals_sizes(
    model: str, batch_size: int, small: dict[str, int], given: float, out: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, _ = analysed(monkeypatch, model, ZOO[model].example(batch_size=batch_size, seed=0), **small)
    assert (report.input_bytes / 1e6, report.output_bytes / 1e6) == (given, out)


def test_a_printout_has_the_labels_of_one_of_the_originals_scripts() -> None:
    """That for vision models has one set of theoretical times; that for GPT-2 two, and variances."""
    report = report_of(forward=[Samples((5.0, 7.0)), Samples((4.0, 4.0))])
    vision, gpt2 = (printout(report, labels=labels) for labels in ("vision", "gpt2"))
    assert "sum of graph weights ms\nforward {0: 5.0, 1: 4.0}\nbackward {0: 9.0, 1: 3.0}\n\nreal times" in vision
    assert "\ntheoretical imbalance:\nforward 0.8\nbackward 0.3333333333333333\n\nreal imbalance:\n" in vision
    assert "\ntheoretical topology aware imbalance:\nforwad 0.8\n" in vision
    assert not any(word in vision for word in ("sequential", "parallel", "variance", "diviation"))
    assert (
        "sequential forward {0: 5.0, 1: 4.0}\nsequential backward {0: 9.0, 1: 3.0}\nparallel forward {0: 3.0," in gpt2
    )
    assert "\ntheoretical parallel imbalance:\nforward 0.75\n" in gpt2
    assert "variance of real execution times ms\nforward{0: 1.0, 1: 0.0}\n" in gpt2


def test_the_models_own_input_and_output_are_told_and_cross_no_cut() -> None:
    told = printout(report_of(link=Link(1000, 1.0)), labels="gpt2")
    assert (
        "0: input size: 9.6e-05 MB recieve_time: 0.001096 ms out: 1e-05 MB send time: 0.00101 ms "
        "(input: the model's own, crosses no cut)\n"
        "1: input size: 1e-05 MB recieve_time: 0.00101 ms out: 4e-05 MB send time: 0.00104 ms "
        "(out: the model's own, crosses no cut)\n"
    ) in told
    report = report_of()
    assert (report.traffic[0].received_bytes, report.traffic[1].sent_bytes) == (0, 0)
