"""Predicted over real, on 2 ranks: the time of each stage, and the step time of a pipeline.

    pipetransformer bench predictor [--repeats 9] [--profiles FOLDER]

In every round costs are measured unit by unit, as the trainer does before training, then some steps of each layout are
timed, then costs again. A ratio is of one round: the mean of both predictions over the steps, so that both have seen
the same machine. Medians over the rounds, with their spread.
A job measures once, before training: with --profiles, ``of one profile`` are the same ratios by the costs of a single
measurement that an earlier run has kept in FOLDER, with its age; where FOLDER has none, this run's first is kept there
for the next one.
Layouts: GPipe and 1F1B, M = 2, 4, 8, recomputation never and always. Predictions are the planner's own, without the
correction by static layouts that a job makes.
Behind them, by what a job measures once and with that correction: the best plans for every number of frozen blocks, and
the plans of live runs (``live.py``).
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean, median
from time import perf_counter, time
from typing import Any

import torch.distributed as dist

from benchmarks.predictor.elastic import of_every_n
from benchmarks.predictor.live import of_live_runs
from benchmarks.support.command_line import bench_parser
from benchmarks.support.measure import CONFIGS, save, spread
from benchmarks.support.ranks import as_ranks
from pipetransformer.config import Config, load_config
from pipetransformer.data import Batch, cache_folder, epoch_batches
from pipetransformer.engine import Engine, PhaseSeconds
from pipetransformer.errors import check_folder
from pipetransformer.launch.arguments import count
from pipetransformer.launch.entry import run_guarded
from pipetransformer.pipe.measure.profile import measure_profile
from pipetransformer.pipe.measure.profile_file import Profile, load_profile, save_profile
from pipetransformer.pipe.measure.workload import Workload
from pipetransformer.pipe.planner.constraints import Constraints
from pipetransformer.pipe.planner.costs import JobCosts
from pipetransformer.pipe.planner.search import best_plans, predict, unit_costs
from pipetransformer.plan import ParallelPlan
from pipetransformer.process.collectives import led_by, slowest
from pipetransformer.process.device import synchronize
from pipetransformer.process.world import World
from pipetransformer.run.job import Job, build_job

CONFIG = CONFIGS / "train_config_digits_no_freeze.yaml"
# A ViT of 5.4 M parameters on 32 x 32 pictures in patches of 4.
MODEL = (
    "model.kwargs={patch_size: 4, embed_dim: 192, depth: 12, num_heads: 3}",
    "data.image_size=32",
    "train.batch_size=32",
)
SCHEDULES, MICROBATCHES, MODES = ("gpipe", "1f1b"), (2, 4, 8), ("never", "always")
STEPS = 3  # timed in a row
LIVE_RUNS = 3


def main() -> None:
    parser = bench_parser("predictor", description=__doc__)
    parser.add_argument("--repeats", type=count, default=9, help="rounds (default 9)")
    parser.add_argument("--profiles", type=Path, metavar="FOLDER", help="keeps a measurement for runs of other hours")
    arguments = parser.parse_args()
    if arguments.profiles is not None:
        check_folder(arguments.profiles, key="--profiles")
    as_ranks(__file__, partial(run, repeats=arguments.repeats, profiles=arguments.profiles), num_ranks=2)


def run(world: World, *, repeats: int, profiles: Path | None) -> None:
    rows: list[dict[str, object]] = []
    for mode in MODES:
        config = load_config(CONFIG, [*MODEL, f"pipe.recompute={mode}", "pipe.microbatches=auto"])
        job = build_job(config, world, lead=partial(led_by, 0))
        kept = None if profiles is None else profiles.absolute() / f"predictor-{mode}.json"
        rows += of_mode(config, job, world, mode=mode, repeats=repeats, kept=kept)
    if world.rank == 0:
        title = "Predicted over real: steps and stages of a pipeline of 2 ranks"
        notes = [f"A ViT of 5.4 M parameters, 32 pictures a step on 2 ranks, {repeats} rounds.", *summary(rows)]
        print(*notes, sep="\n")
        print(f"saved {save('predictor', rows, title=title, notes=notes)}")
    config = load_config(CONFIG, [*MODEL, "train.precision=float32"])
    job = build_job(config, world, lead=partial(led_by, 0))
    frozen = of_every_n(config, job, world, repeats=repeats)
    if world.rank == 0:
        medians = [float(str(row["step_ratio"])) for row in frozen]
        notes = [f"All blocks in front are read; {repeats} rounds; medians {min(medians):.3f} .. {max(medians):.3f}."]
        title = "Predicted over real for every n, by what a job measures once"
        print(*notes, f"saved {save('predictor-frozen', frozen, title=title, notes=notes)}", sep="\n")
    live = of_live_runs(world, repeats=LIVE_RUNS)
    if world.rank == 0:
        medians = [float(str(row["step_ratio"])) for row in live]
        notes = [f"{LIVE_RUNS} runs of the demo, all in one; medians {min(medians):.3f} .. {max(medians):.3f}."]
        title = "Predicted over real in live runs: of each plan, as it was predicted when it was taken"
        print(*notes, f"saved {save('predictor-live', live, title=title, notes=notes)}", sep="\n")


def summary(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The least and most of all layouts' medians and of all single rounds."""
    ratios = {
        "steps": [row["step_ratios"] for row in rows],
        "stages": [ratios for row in rows for ratios in row["stage_ratios"]],
        "steps by the costs of one profile": [r for row in rows if (r := row["step_ratios_of_one_profile"])],
    }
    return [
        f"Predicted over real, {name}: medians {min(map(median, lists)):.3f} .. {max(map(median, lists)):.3f}, single "
        f"rounds {min(map(min, lists)):.3f} .. {max(map(max, lists)):.3f}."
        for name, lists in ratios.items()
        if lists
    ]


def of_mode(
    config: Config, job: Job, world: World, *, mode: str, repeats: int, kept: Path | None
) -> list[dict[str, object]]:
    """Args: kept: file of the one profile, for this run or the next one; None for none."""
    data, train = job.datasets["train"], config.train
    batches = epoch_batches(data.lengths, batch_size=train.batch_size, seed=0, epoch=0, num_nodes=1)
    workload = Workload.of(batches, config, num_ranks=2, local_size=2)
    bench = Bench(job, config, batches[0], world=world)

    def measured() -> Profile:
        if world.rank == 0:  # what was measured before; the folder is ``as_ranks``'s own
            shutil.rmtree(cache_folder() / "profiles", ignore_errors=True)
        bench.give_back()
        return measure_profile(job.chain, data, workload=workload, config=config, world=world)

    first = measured()
    before, once = first.job, None if kept is None else led_by(0, partial(earlier_profile, first, kept))
    plans = {
        layout: plan_of(*layout, config=config, job=job, costs=before) for layout in product(SCHEDULES, MICROBATCHES)
    }
    found = {layout: Rounds(plan) for layout, plan in plans.items()}
    for number in range(repeats):
        layouts = list(plans)[:: -1 if number % 2 else 1]  # each is as near to one measurement as to the other
        real = {layout: bench.time(plans[layout]) for layout in layouts}
        behind = measured().job
        for layout, (step, stages) in real.items():
            alone = None if once is None else once.profile.job
            found[layout].add((before, behind), alone, step=step, stages=stages, global_batch_size=train.batch_size)
        before = behind
    age = None if once is None else once.age_hours
    return [{**row_of(rounds, mode=mode, world=world), "profile_age_hours": age} for rounds in found.values()]


@dataclass(frozen=True, slots=True)
class Earlier:
    profile: Profile
    age_hours: float


def earlier_profile(first: Profile, kept: Path) -> Earlier | None:
    """The profile that ``kept`` holds; where there is none, ``first`` is kept from then on."""
    if not kept.exists():
        save_profile(first, kept, key="--profiles")
        return None
    return Earlier(load_profile(kept), (time() - kept.stat().st_mtime) / 3600)


@dataclass(frozen=True, slots=True)
class Rounds:
    """One layout's figures, round by round."""

    plan: ParallelPlan
    predicted: list[float] = field(default_factory=list)
    real: list[float] = field(default_factory=list)
    step_ratios: list[float] = field(default_factory=list)
    once_ratios: list[float] = field(default_factory=list)
    stage_ratios: list[list[float]] = field(default_factory=list)
    contention: list[float] = field(default_factory=list)

    def add(
        self,
        around: tuple[JobCosts, JobCosts],
        once: JobCosts | None,
        *,
        step: float,
        stages: Sequence[float],
        global_batch_size: int,
    ) -> None:
        """One round.

        Args:
            around: what was measured before the steps and behind them.
            once: of the one profile.
            step, stages: seconds that they took.
        """

        def seconds(costs: JobCosts) -> float:
            return predict(self.plan, costs=costs, global_batch_size=global_batch_size).step_seconds

        predicted = mean(map(seconds, around))
        expected = zip(*(stage_seconds(self.plan, costs, global_batch_size=global_batch_size) for costs in around))
        self.predicted.append(predicted)
        self.real.append(step)
        self.step_ratios.append(predicted / step)
        if once is not None:
            self.once_ratios.append(seconds(once) / step)
        self.stage_ratios.append([mean(both) / real for both, real in zip(expected, stages, strict=True)])
        self.contention.append(mean(costs.contention for costs in around))


class Bench:
    """Real steps of any plan."""

    def __init__(self, job: Job, config: Config, batch: Batch, *, world: World) -> None:
        self._engine = Engine(job.chain, job.datasets, config, world)
        self._batch, self._world = batch, world
        self._step = 0

    def time(self, plan: ParallelPlan) -> tuple[float, list[float]]:
        """Seconds of a step, the slowest rank's, and of each rank's computing: medians of some steps in a row."""
        self._engine.enter(plan)
        self._engine.chain.train()
        incoming = self._engine.feed("train").batches([self._batch] * (1 + STEPS), epoch=0)
        steps, computing = list[float](), list[float]()
        for number in range(1 + STEPS):  # the first builds the schedule
            batch = next(incoming)
            dist.barrier()
            self._engine.stepper.seconds = PhaseSeconds()
            start = perf_counter()
            self._engine.step(batch, step=self._step, lr=0.0)
            synchronize(self._world.device)
            seconds, self._step = slowest(perf_counter() - start), self._step + 1
            if number:
                steps.append(seconds)
                phases = self._engine.stepper.seconds
                computing.append(phases.forward + phases.backward)
        incoming.close()
        everyone = [0.0] * self._world.size
        dist.all_gather_object(everyone, median(computing))
        return median(steps), everyone

    def give_back(self) -> None:
        """As measurements before training find the job."""
        self._engine.forget()


def plan_of(schedule: str, m: int, *, config: Config, job: Job, costs: JobCosts) -> ParallelPlan:
    """Cut by ``costs``."""
    constraints = Constraints(
        world_size=2, global_batch_size=config.train.batch_size, schedules=((schedule, 1),), num_microbatches=m,
        pipeline_lengths=(2,), memory_limit=None,
    )  # fmt: skip
    best, *_ = best_plans(
        0, cached=None, costs=costs, constraints=constraints, num_blocks=job.chain.num_blocks, lines={}
    )
    return best.plan


def stage_seconds(plan: ParallelPlan, costs: JobCosts, *, global_batch_size: int) -> list[float]:
    """Seconds of each stage's computing in a step, by the units' costs."""
    unit = unit_costs(plan, costs, global_batch_size=global_batch_size)
    return [
        plan.num_microbatches
        * sum(unit.forward_ns[u] + unit.backward_ns[u] + unit.recompute_ns[u] for u in plan.stage_units(stage))
        / 1e9
        for stage in range(plan.num_stages)
    ]


def row_of(rounds: Rounds, *, mode: str, world: World) -> dict[str, object]:
    plan = rounds.plan
    by_stage = [list(ratios) for ratios in zip(*rounds.stage_ratios)]
    once = f"of one profile {spread(rounds.once_ratios)}, " if rounds.once_ratios else ""
    if world.rank == 0:
        print(
            f"{plan.schedule:6} M {plan.num_microbatches} {mode:7} step {spread([1e3 * t for t in rounds.real])} ms, "
            f"predicted over real: step {spread(rounds.step_ratios)}, {once}stages {', '.join(map(spread, by_stage))}",
            flush=True,
        )
    return {
        "schedule": plan.schedule,
        "M": plan.num_microbatches,
        "checkpoint": mode,
        "boundaries": plan.boundaries,
        "predicted_step_s": rounds.predicted,
        "real_step_s": rounds.real,
        "step_ratio": median(rounds.step_ratios),
        "stage_ratio": [median(ratios) for ratios in by_stage],
        "step_ratios": rounds.step_ratios,
        "step_ratio_of_one_profile": median(rounds.once_ratios) if rounds.once_ratios else None,
        "step_ratios_of_one_profile": rounds.once_ratios or None,
        "stage_ratios": by_stage,
        "contention": rounds.contention,
    }


if __name__ == "__main__":
    sys.exit(run_guarded(main))
