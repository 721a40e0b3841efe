"""The figures of some steps, gathered from all ranks."""

from __future__ import annotations

from dataclasses import asdict, astuple, dataclass

import torch
import torch.distributed as dist

from pipetransformer.engine import NormSums, Objective, PhaseSeconds
from pipetransformer.plan import ParallelPlan


@dataclass(frozen=True, slots=True)
class StepFigures:
    """The figures of some steps, over all ranks. ``events.jsonl`` has them by these names, in this order.

    Attributes:
        num_steps: number of the steps.
        seconds: wall-clock seconds of the steps.
        loss: mean loss of the samples.
        accuracy: share of correct answers, 0 to 1; 0 for tasks with scores.
        samples_per_s: samples per second.
        hits: number of samples read from the cache.
        misses: number of samples whose prefix was computed, though the plan had a cache.
        sent_bytes_by_rank: bytes of gradients [ranks] that every rank gave to be summed, counted as it gave them.
        phase_seconds_by_rank: seconds of every rank [ranks], by phase.
        gradient_norms: mean norm of each block's gradient before clipping, 0 for frozen blocks [blocks]; None where no
            step's was taken.
    """

    num_steps: int
    seconds: float
    loss: float
    accuracy: float
    samples_per_s: float
    hits: int
    misses: int
    sent_bytes_by_rank: list[int]
    phase_seconds_by_rank: dict[str, list[float]]
    gradient_norms: list[float] | None

    @classmethod
    def gather(
        cls,
        objective: Objective,
        phases: PhaseSeconds,
        norms: NormSums,
        *,
        num_steps: int,
        seconds: float,
        hits: int = 0,
        misses: int = 0,
        sent_bytes: int = 0,
    ) -> StepFigures:
        """Collective. Gathers the figures of the last steps from all ranks.

        Args:
            objective: the loss, with this rank's sums over the steps.
            phases: this rank's seconds by phase.
            norms: gradient norms, the same on all ranks.
            num_steps: number of the steps.
            seconds: wall-clock seconds of the steps.
            hits: this rank's samples read from the cache.
            misses: this rank's samples whose prefix was computed, though the plan had a cache.
            sent_bytes: bytes of gradients that this rank gave to be summed.
        """
        sums = [float(x) for x in (objective.loss_sum, objective.num_correct, objective.num_samples, hits, misses)]
        mine = torch.tensor([*sums, sent_bytes, *astuple(phases)], dtype=torch.float64)
        gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, mine)
        table = torch.stack(gathered)
        loss_sum, correct, samples, all_hits, all_misses = table[:, : len(sums)].sum(dim=0).tolist()
        samples = max(samples, 1.0)
        return cls(
            num_steps=num_steps,
            seconds=seconds,
            loss=loss_sum / samples,
            accuracy=correct / samples,
            samples_per_s=samples / seconds if seconds else 0.0,
            hits=int(all_hits),
            misses=int(all_misses),
            sent_bytes_by_rank=[int(sent) for sent in table[:, len(sums)].tolist()],
            phase_seconds_by_rank={
                name: column.tolist() for name, column in zip(asdict(phases), table[:, len(sums) + 1 :].T, strict=True)
            },
            gradient_norms=norms.mean,
        )

    @property
    def hit_rate(self) -> float | None:
        """The share of samples read from the cache, 0 to 1; None without a cache."""
        return self.hits / (self.hits + self.misses) if self.hits + self.misses else None

    def metrics(self, plan: ParallelPlan, *, transition_seconds: float) -> dict[str, float]:
        """The figures by their names on the dashboard: those of the original PipeTransformer, and this project's.

        Phases are seconds of one step on the slowest rank; ``reduction_time_per_batch`` is the part that the backward
        does not hide. ``comm_frequency`` counts sums of gradients per second. ``size_params_ddp_sum`` is the bytes of
        gradients that one pipeline gives to be summed in a step (the original counts millions of parameters, in
        the same place), and ``bandwidth`` the bytes that it gives in a second of training.

        Args:
            transition_seconds: seconds of the transition since the last figures, or 0.
        """
        slowest = {name: max(column) / self.num_steps for name, column in self.phase_seconds_by_rank.items()}
        sent_bytes = sum(self.sent_bytes_by_rank) / plan.dp
        metrics = {
            "Train/Loss": self.loss,
            "Train/Acc": self.accuracy,
            "sample_throughput": self.samples_per_s,
            "comm_frequency": self.num_steps / self.seconds if plan.dp > 1 and self.seconds else 0.0,
            "size_params_ddp_sum": sent_bytes / self.num_steps,
            "bandwidth": sent_bytes / self.seconds if self.seconds else 0.0,
            "data_time_per_batch": slowest["data"],
            "forward_time_per_batch": slowest["forward"] + slowest["prefix"],
            "backwards_time_per_batch": slowest["backward"],
            "reduction_time_per_batch": slowest["reduction"],
            "frozen_blocks": plan.frozen,
            "pp": plan.pp,
            "dp": plan.dp,
            "microbatches": plan.num_microbatches,
            "transition_seconds": transition_seconds,
        }
        if self.hit_rate is not None:
            metrics["cache_hit_rate"] = self.hit_rate
        norms = {f"gradient_norm/block_{block}": norm for block, norm in enumerate(self.gradient_norms or ())}
        return {**metrics, **norms}
