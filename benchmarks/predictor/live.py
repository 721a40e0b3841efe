"""Predicted over real in runs that decide for themselves: the step that was predicted when a plan was taken."""

from __future__ import annotations

import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable
from statistics import median
from time import perf_counter

from benchmarks.support.measure import CONFIGS, spread
from pipetransformer.config import load_config
from pipetransformer.plan import ParallelPlan
from pipetransformer.process.collectives import led_by
from pipetransformer.process.world import World
from pipetransformer.run import events
from pipetransformer.trainer import Trainer

FEWEST_STEPS = 10


class PlanTimes:
    """Listens to a run: predicted seconds of each plan's step, and seconds between its steps.

    A median over these leaves out the few that an evaluation, a checkpoint or a last, smaller batch made longer or
    shorter.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._predicted: dict[ParallelPlan, float] = {}
        self._seconds: dict[ParallelPlan, list[float]] = defaultdict(list)
        self._before: tuple[ParallelPlan, float] | None = None

    def hear(self, event: events.Event) -> None:
        if isinstance(event, events.Adopted):
            self._before = None
            if event.choice is not None:
                self._predicted[event.plan] = event.choice.prediction.step_seconds
        elif isinstance(event, events.Stepped):
            now = self._clock()
            if self._before is not None and self._before[0] == event.plan:
                self._seconds[event.plan].append(now - self._before[1])
            self._before = event.plan, now

    def ratios(self) -> dict[ParallelPlan, float]:
        """Predicted over real, of plans with enough steps."""
        return {
            plan: predicted / median(self._seconds[plan])
            for plan, predicted in self._predicted.items()
            if len(self._seconds[plan]) >= FEWEST_STEPS
        }


def of_live_runs(world: World, *, repeats: int) -> list[dict[str, object]]:
    """Collective. A row for each layout and n that the demo took, all in one, until all of its blocks are frozen."""
    found: dict[tuple[int, int, int], list[float]] = defaultdict(list)
    for _ in range(repeats):
        folder = led_by(0, tempfile.mkdtemp)
        overrides = (
            f"run.dir={folder}",
            "run.id=live",
            "log.wandb=disabled",
            "freeze.alpha=0.5",
            "freeze.warmup=4 epochs",
        )
        config = load_config(CONFIGS / "train_config_digits_all_in_one.yaml", overrides)
        times = PlanTimes()
        Trainer(config, world, listeners=[times.hear]).run()
        for plan, ratio in times.ratios().items():
            found[plan.pp, plan.frozen, plan.num_microbatches].append(ratio)
        led_by(0, lambda folder=folder: shutil.rmtree(folder, ignore_errors=True))
    rows: list[dict[str, object]] = []
    for (pp, frozen, num_microbatches), ratios in sorted(found.items(), key=lambda item: item[0][1]):
        if world.rank == 0:
            print(f"live, pp {pp}, n {frozen}, M {num_microbatches}: {spread(ratios)}", flush=True)
        own = {"pp": pp, "n": frozen, "M": num_microbatches}
        rows.append({**own, "runs": len(ratios), "step_ratio": median(ratios), "step_ratios": ratios})
    return rows
