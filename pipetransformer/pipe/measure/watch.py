"""New measurements during training: the real time of each stage, compared with the costs of its units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from pipetransformer.data import Batch
from pipetransformer.engine.step import PhaseSeconds
from pipetransformer.pipe.measure.profile_file import Profile
from pipetransformer.pipe.measure.workload import Workload
from pipetransformer.pipe.planner.costs import UnitCosts, total
from pipetransformer.pipe.planner.search import unit_costs
from pipetransformer.plan import ParallelPlan

FEWEST_STEPS = 10
"""With fewer steps, the slow first steps of a plan would weigh too much."""


class CostWatch:
    """Scales the unit costs of ``profile`` to the times of the stages in training.

    A stage in a step takes more than the sum of its units, and ranks of a shared machine differ in speed. Each rank
    adds up the measured and the expected seconds of its stages; their ratio scales the costs of its units. The sum of
    all costs stays: only the balance between stages is learned, because the planner's lines already cover the speed of
    whole steps.

    Note: on a GPU, the phases of a step are the times of the kernels' launches. Nothing can be learned from them.
    """

    def __init__(self, profile: Profile, workload: Workload, *, rank: int, global_batch_size: int) -> None:
        self._original, self._modal_length = profile, workload.modal_length
        self._rank, self._global_batch_size = rank, global_batch_size
        self.clear()

    def clear(self) -> None:
        """Deletes the sums, for the start of another plan."""
        self._plan: ParallelPlan | None = None
        self._num_steps = 0
        self._spent = [0.0, 0.0]
        self._expected = [0.0, 0.0]

    def spent(self, seconds: PhaseSeconds) -> None:
        """Adds this rank's seconds of some steps."""
        self._spent[0] += seconds.forward
        self._spent[1] += seconds.backward

    def trained(self, plan: ParallelPlan, batches: Sequence[Batch]) -> None:
        """Adds the expected seconds of these steps.

        Args:
            plan: the plan of the steps.
            batches: the global batches of the steps.
        """
        if plan.prefix == "in_place" or (plan.shard == "full" and plan.shares_state):  # its stages tell of other costs
            return
        job, by_length = self._original.job, self._original.measured
        unit = unit_costs(plan, job, global_batch_size=self._global_batch_size)
        share = job.recomputed_share(plan.num_microbatches)
        modal = sum(by_length[self._modal_length].step_ns)
        weight = sum(sum(by_length[batch.length].step_ns) / modal for batch in batches) * plan.num_microbatches / 1e9
        for units in plan.staged_units_of(self._rank):
            self._expected[0] += weight * total(unit.forward_ns, units)
            self._expected[1] += weight * total(unit.backward_ns, units)
            self._expected[1] += weight * share * total(unit.recompute_ns, units)
        self._plan = plan
        self._num_steps += len(batches)

    def take(self) -> Profile | None:
        """Collective. The profile by the steps since the last call, from the slowest replica.

        Returns None after too few steps, and for pp = 1, where there are no stages to compare.
        """
        if self._plan is None or self._num_steps < FEWEST_STEPS or self._plan.pp == 1:
            return None
        num_units = self._plan.num_units
        ratios = torch.zeros(2, num_units, dtype=torch.float64)
        for units in self._plan.staged_units_of(self._rank):
            for kind in (0, 1):
                ratios[kind, units.start : units.stop] = self._spent[kind] / max(self._expected[kind], 1e-9)
        dist.all_reduce(ratios, op=dist.ReduceOp.MAX)
        first, unit = self._plan.first_active, next(iter(self._original.job.by_rows.values()))
        expected = torch.tensor([unit.forward_ns, unit.backward_ns], dtype=torch.float64)[:, first:]
        ratios[:, first:] *= expected.sum() / (expected * ratios[:, first:]).sum()
        ratios[:, :first] = 1.0
        self.clear()
        forward, backward = ratios.tolist()
        scaled = {rows: _scaled(costs, forward, backward) for rows, costs in self._original.job.by_rows.items()}
        return replace(
            self._original,
            job=replace(self._original.job, by_rows=scaled),
            measured={n: _scaled(costs, forward, backward) for n, costs in self._original.measured.items()},
        )


def _scaled(costs: UnitCosts, forward: Sequence[float], backward: Sequence[float]) -> UnitCosts:
    def times(column: Sequence[int], ratios: Sequence[float]) -> tuple[int, ...]:
        return tuple(round(ns * ratio) for ns, ratio in zip(column, ratios, strict=True))

    return replace(
        costs,
        forward_ns=times(costs.forward_ns, forward),
        backward_ns=times(costs.backward_ns, backward),
        weight_ns=times(costs.weight_ns, backward),
        recompute_ns=times(costs.recompute_ns, backward),
        prefix_ns=times(costs.prefix_ns, forward),
    )
