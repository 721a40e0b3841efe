"""Ways to train that are compared: the largest batch of each, and rounds in which they take turns, on fresh ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from benchmarks.ddp_vs_pipe.fresh_ranks import FreshRanks, OutOfMemory
from benchmarks.ddp_vs_pipe.largest import largest_batch
from benchmarks.ddp_vs_pipe.trials import Trial, time_in_turn, time_steps

__all__ = ["Bench", "Method"]


@dataclass(frozen=True, slots=True, eq=False)
class Method:
    """A way to train. ``trial`` is one of it, at any batch; ``step``: its batches are multiples of this."""

    name: str
    trial: Trial
    step: int
    bubble: float | None = None

    @property
    def chunks(self) -> int | None:
        """M; None where the batch is not cut."""
        m = self.trial.plan.num_microbatches
        return m if m > 1 else None


@dataclass(slots=True)
class Bench:
    """Measurements of this machine, each told as it is made.

    Attributes:
        memory: bytes of a rank beyond which a batch counts as out of memory.
        peaks: bytes of the fullest rank, each of fresh ranks.
    """

    ranks: FreshRanks
    memory: int
    peaks: dict[tuple[Method, int], int] = field(default_factory=dict)

    def largest(self, method: Method, *, most: int) -> tuple[int, int | None]:
        return largest_batch(lambda batch: self.peak(method, batch), limit=self.memory, step=method.step, most=most)

    def same(self, method: Method, other: Method) -> None:
        """``method`` is ``other`` under another name or bubble: its peaks are known."""
        self.peaks |= {(method, batch): peak for (known, batch), peak in self.peaks.items() if known is other}

    def peak(self, method: Method, batch: int) -> int | None:
        """Bytes of the fullest rank in its first steps; None if it ran out of memory."""
        if (method, batch) in self.peaks:
            return self.peaks[method, batch]
        trial = replace(method.trial, batch=batch, steps=1)
        what = f"{method.name}, M {trial.plan.num_microbatches}, batch {batch}"
        try:
            found = self.ranks.run(time_steps, trial, num_ranks=trial.plan.world_size)
        except OutOfMemory:
            print(f"{what}: out of memory", flush=True)
            return None
        peak = self.peaks[method, batch] = max(steps.peak_bytes for steps in found)
        verdict = "fits" if self.holds(method, batch) else "out of memory"
        print(f"{what}: {peak / 1e6:.0f} MB, {verdict}", flush=True)
        return peak

    def holds(self, method: Method, batch: int) -> bool:
        """Whether the batch was measured and is within the memory of a rank."""
        return (method, batch) in self.peaks and self.peaks[method, batch] <= self.memory

    def rates(self, entries: Sequence[tuple[Method, int]], *, repeats: int) -> dict[tuple[Method, int], list[float]]:
        """Images/s of every round. A round is one job of fresh ranks, and each begins with another entry."""
        rates: dict[tuple[Method, int], list[float]] = defaultdict(list)
        for number in range(repeats if entries else 0):
            first = number % len(entries)
            order = [*entries[first:], *entries[:first]]
            trials = tuple(replace(method.trial, batch=batch) for method, batch in order)
            seconds, *_ = self.ranks.run(time_in_turn, trials, num_ranks=trials[0].plan.world_size)
            for (method, batch), taken in zip(order, seconds, strict=True):
                rates[method, batch].append(batch / taken)
            print(f"round {number + 1} of {repeats}", flush=True)
        return rates
