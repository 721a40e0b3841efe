"""The quantities of FTPipe's partition analysis (Eliad et al., USENIX ATC 2021), as pure functions of times and edges.

Parts are numbered in topological order; ``connected`` holds (a, b) with a < b where part a sends to part b.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

Pairs = Collection[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class PartTimes:
    """Milliseconds by part."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]

    @property
    def both(self) -> tuple[float, ...]:
        return tuple(f + b for f, b in zip(self.forward, self.backward, strict=True))


def imbalance(times: Sequence[float]) -> float:
    """Fastest over slowest part: 1 is balanced."""
    return min(times) / max(times) if max(times) > 0 else 1.0


def topology_imbalance(times: Sequence[float], *, connected: Pairs) -> float:
    """The worst imbalance of two parts of which one sends to the other."""
    return min((imbalance((times[a], times[b])) for a, b in connected), default=1.0)


def latencies(times: PartTimes, *, connected: Pairs) -> PartTimes:
    """The earliest end of each part if all that it needs goes before.

    Its own time, and that of all predecessors in the forward, of all successors in the backward.
    """
    num_parts = len(times.forward)
    before: dict[int, set[int]] = {part: set() for part in range(num_parts)}
    for a, b in sorted(connected, key=lambda pair: pair[1]):
        before[b] |= before[a] | {a}
    after = {part: {other for other in range(num_parts) if part in before[other]} for part in range(num_parts)}
    return PartTimes(
        tuple(times.forward[part] + sum(times.forward[p] for p in before[part]) for part in range(num_parts)),
        tuple(times.backward[part] + sum(times.backward[p] for p in after[part]) for part in range(num_parts)),
    )


def longest_path(costs: Sequence[float], units: range, *, sources: Mapping[int, Collection[int]]) -> float:
    """The costliest chain of units inside a part: its time where independent units run side by side.

    Args:
        sources: by unit, the units that it needs.
    """
    ends: dict[int, float] = {}
    for unit in units:
        ends[unit] = costs[unit] + max((ends[s] for s in sources.get(unit, ()) if s in ends), default=0.0)
    return max(ends.values(), default=0.0)
