"""The timeline of real steps: one of each plan, as every rank's clock has it, in the format that Perfetto opens.

The format is Chrome's trace events: a process for each plan, a thread for each rank, times in microseconds.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipetransformer.adapter import StageTimes
from pipetransformer.plan import ParallelPlan
from pipetransformer.process.collectives import values_of_ranks
from pipetransformer.run.page import TIMELINE

_MOST_PLANS = 20


class Timeline:
    """Keeps one step of each plan. All ranks call it alike.

    Args:
        folder: of the run.
        rank: this rank; rank 0 writes.
        local_size: number of ranks of a node: the clocks of nodes have nothing in common.
    """

    def __init__(self, folder: Path, *, rank: int, local_size: int) -> None:
        self._folder, self._is_first, self._local_size = folder, rank == 0, local_size
        self._seen = set[ParallelPlan]()
        self._events = list[dict[str, Any]]()

    def step_of(self, plan: ParallelPlan, *, first_step: int, stop: int) -> int:
        """The step of ``first_step`` .. ``stop`` - 1 that is to be drawn, the last of some; -1 for none."""
        is_new = plan not in self._seen and len(self._seen) < _MOST_PLANS
        return stop - 1 if is_new and stop > first_step + 1 else -1

    def add(self, plan: ParallelPlan, times: StageTimes, *, step: int) -> None:
        """Collective. Takes this rank's part of a step, and writes all of them."""
        self._seen.add(plan)
        everyone = values_of_ranks(times.spans or [])
        times.spans = None
        if not self._is_first:
            return
        number, size = len(self._seen), self._local_size
        begins = [  # of each node's first work
            min((span.start for part in everyone[first : first + size] for span in part), default=0.0)
            for first in range(0, len(everyone), size)
        ]
        frozen = f"{plan.frozen} of {plan.num_blocks} frozen"
        name = f"step {step}: {frozen}, pp {plan.pp} x dp {plan.dp}, M {plan.num_microbatches}"
        self._events.append({"name": "process_name", "ph": "M", "pid": number, "args": {"name": name, "step": step}})
        for rank, part in enumerate(everyone):
            replica, stage = plan.replica_of(rank), plan.stage_of(rank)
            told = {"name": f"rank {rank} (replica {replica}, stage {stage})"}
            self._events.append({"name": "thread_name", "ph": "M", "pid": number, "tid": rank, "args": told})
            for span in part:
                of = {} if span.microbatch is None else {"stage": span.stage, "micro-batch": span.microbatch}
                label = span.kind if span.microbatch is None else f"{span.kind} {span.microbatch}"
                at, length = 1e6 * (span.start - begins[rank // size]), 1e6 * (span.stop - span.start)
                place = {"pid": number, "tid": rank, "ts": round(at, 1), "dur": round(length, 1)}
                self._events.append({"name": label, "cat": span.kind, "ph": "X", **place, "args": of})
        text = json.dumps({"traceEvents": self._events, "displayTimeUnit": "ms"})
        with suppress(OSError):  # a full disk may cost a picture, no job
            (self._folder / TIMELINE).write_text(text, encoding="utf-8")
