"""The figures of some steps, gathered from all ranks."""

from __future__ import annotations

from dataclasses import asdict, astuple, dataclass

import torch
import torch.distributed as dist

from pipetransformer.plan import ParallelPlan
from pipetransformer.run.events import Logged
from pipetransformer.run.tracking import train_metrics


@dataclass(frozen=True, slots=True)
class StepFigures:
    """The figures of some steps, over all ranks.

    Attributes:
        num_steps: number of the steps.
        seconds: wall-clock seconds of the steps.
        loss: mean loss of the samples.
        accuracy: share of correct answers, 0 to 1.
        samples_per_s: samples per second.
        hits: number of samples read from the cache.
        misses: number of samples whose prefix was computed, though the plan had a cache.
        by_phase: seconds of every rank [ranks], by phase.
    """

    num_steps: int
    seconds: float
    loss: float
    accuracy: float
    samples_per_s: float
    hits: int
    misses: int
    by_phase: dict[str, list[float]]

    @property
    def hit_rate(self) -> float | None:
        """The share of samples read from the cache, 0 to 1; None without a cache."""
        return self.hits / (self.hits + self.misses) if self.hits + self.misses else None

    def metrics(self, plan: ParallelPlan, *, transition_seconds: float) -> dict[str, float]:
        """The figures by their names on the dashboard; phases are seconds of one step on the slowest rank.

        Args:
            transition_seconds: seconds of the transition since the last figures, or 0.
        """
        slowest = {name: max(column) / self.num_steps for name, column in self.by_phase.items()}
        return train_metrics(
            loss=self.loss,
            accuracy=self.accuracy,
            samples_per_second=self.samples_per_s,
            synchronisations_per_second=self.num_steps / self.seconds if plan.dp > 1 and self.seconds else 0.0,
            forward_seconds=slowest["forward"] + slowest["prefix"],
            backward_seconds=slowest["backward"],
            frozen_blocks=plan.frozen,
            pp=plan.pp,
            dp=plan.dp,
            num_microbatches=plan.num_microbatches,
            transition_seconds=transition_seconds,
            cache_hit_rate=self.hit_rate,
        )


def gather_steps(pause: Logged, *, num_steps: int, hits: int, misses: int) -> StepFigures:
    """Collective. Gathers the figures of the steps before ``pause`` from all ranks.

    Args:
        num_steps: number of the steps.
        hits: this rank's samples read from the cache.
        misses: this rank's samples whose prefix was computed, though the plan had a cache.
    """
    sums = (pause.loss_sum, pause.num_correct, pause.num_samples, float(hits), float(misses))
    mine = torch.tensor([*sums, *astuple(pause.phases)], dtype=torch.float64)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    table = torch.stack(gathered)
    loss_sum, correct, samples, all_hits, all_misses = table[:, : len(sums)].sum(dim=0).tolist()
    samples = max(samples, 1.0)
    return StepFigures(
        num_steps=num_steps,
        seconds=pause.seconds,
        loss=loss_sum / samples,
        accuracy=correct / samples,
        samples_per_s=samples / pause.seconds if pause.seconds else 0.0,
        hits=int(all_hits),
        misses=int(all_misses),
        by_phase={n: c.tolist() for n, c in zip(asdict(pause.phases), table[:, len(sums) :].T, strict=True)},
    )
