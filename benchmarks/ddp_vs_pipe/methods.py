"""Ways to train that are compared: the largest batch of each, and rounds in which they take turns, on fresh ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from benchmarks.ddp_vs_pipe.fresh_ranks import FreshRanks, OutOfMemory
from benchmarks.ddp_vs_pipe.largest import largest_batch
from benchmarks.ddp_vs_pipe.trials import Trial, time_steps

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
        return self.trial.plan.num_microbatches if self.trial.plan.pp > 1 else None


@dataclass(slots=True)
class Bench:
    """Measurements of this machine, each told as it is made.

    Attributes:
        memory: bytes of a rank beyond which a batch counts as out of memory; None: where the GPU says so.
    """

    ranks: FreshRanks
    memory: int | None
    peaks: dict[tuple[Method, int], int] = field(default_factory=dict)

    def largest(self, method: Method, *, most: int) -> tuple[int, int | None]:
        return largest_batch(lambda batch: self._fits(method, batch), step=method.step, most=most)

    def same(self, method: Method, other: Method) -> None:
        """``method`` is ``other`` under another name or bubble: its peaks are known."""
        self.peaks |= {(method, batch): peak for (known, batch), peak in self.peaks.items() if known is other}

    def _fits(self, method: Method, batch: int) -> bool:
        trial = replace(method.trial, batch=batch, steps=1)
        try:
            found = self.ranks.run(time_steps, trial, num_ranks=trial.plan.world_size)
        except OutOfMemory:
            print(f"{method.name}, M {trial.plan.num_microbatches}, batch {batch}: out of memory", flush=True)
            return False
        peak = self.peaks[method, batch] = max(steps.peak_bytes for steps in found)
        fits = self.holds(method, batch)
        verdict = "fits" if fits else "out of memory"
        print(
            f"{method.name}, M {trial.plan.num_microbatches}, batch {batch}: {peak / 1e6:.0f} MB, {verdict}", flush=True
        )
        return fits

    def holds(self, method: Method, batch: int) -> bool:
        """Whether the peak that was measured is within the memory of a rank."""
        return self.memory is None or self.peaks[method, batch] <= self.memory

    def rates(self, entries: Sequence[tuple[Method, int]], *, repeats: int) -> dict[tuple[Method, int], list[float]]:
        """Images/s of every round; one that runs out of memory gets none."""
        rates: dict[tuple[Method, int], list[float]] = defaultdict(list)
        for number in range(repeats):
            for method, batch in entries:
                trial = replace(method.trial, batch=batch)
                try:
                    found = self.ranks.run(time_steps, trial, num_ranks=trial.plan.world_size)
                except OutOfMemory:
                    continue
                rates[method, batch].append(batch / found[0].seconds)
                self.peaks.setdefault((method, batch), max(steps.peak_bytes for steps in found))
            print(f"round {number + 1} of {repeats}", flush=True)
        return rates
