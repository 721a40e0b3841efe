"""Cuts by what parts take where they run, and costs of a graph's units that are kept."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipetransformer.graphs.analysis import cut
from pipetransformer.graphs.analysis.parts import Samples
from pipetransformer.graphs.graph import GraphCosts
from pipetransformer.graphs.graph.profile_file import kept_costs
from pipetransformer.pipe.planner.costs import Link


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
