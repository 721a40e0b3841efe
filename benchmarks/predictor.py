"""Predicted over real, on 2 ranks: the time of each stage, and the step time of a pipeline.

    python benchmarks/predictor.py [--repeats 9]

Costs are measured unit by unit, as the trainer does before training; then real steps of every layout are timed, round
by round in turn. Layouts: GPipe and 1F1B, M = 2, 4, 8, recomputation never and always.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

import torch.distributed as dist
from support.measure import save, spread
from support.ranks import is_rank, launch, slowest

from pipetransformer.config import Config, load_config
from pipetransformer.data import epoch_batches
from pipetransformer.distributed import World, close_world, init_world, led_by, synchronize
from pipetransformer.feed import Feed
from pipetransformer.layout import initial_ownership, move
from pipetransformer.measure import Workload, measure_profile
from pipetransformer.pipe.objective import Objective
from pipetransformer.pipe.planner import Constraints, best_plan, predict, unit_costs
from pipetransformer.plan import ParallelPlan
from pipetransformer.setup import Job, build_job
from pipetransformer.step import PhaseSeconds, Stepper

CONFIG = Path(__file__).resolve().parent.parent / "config" / "train_config_digits_no_freeze.yaml"
# A ViT of 5.4 M parameters on 32 x 32 pictures in patches of 4.
MODEL = (
    "model.kwargs={patch_size: 4, embed_dim: 192, depth: 12, num_heads: 3}",
    "data.image_size=32",
    "train.batch_size=32",
)
SCHEDULES, MICROBATCHES, MODES = ("gpipe", "1f1b"), (2, 4, 8), ("never", "always")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    if is_rank():
        run(repeats=arguments.repeats)
    else:
        launch(__file__, num_ranks=2)


def run(*, repeats: int) -> None:
    world = init_world(timeout_seconds=300)
    rows: list[dict[str, object]] = []
    for mode in MODES:
        config = load_config(CONFIG, [*MODEL, f"pipe.checkpoint={mode}", "pipe.microbatches=auto"])
        job = build_job(config, world, lead=partial(led_by, 0))
        rows += of_mode(config, job, world, mode=mode, repeats=repeats)
    if world.rank == 0:
        print(f"saved {save('predictor', rows)}")
    close_world()


def of_mode(config: Config, job: Job, world: World, *, mode: str, repeats: int) -> list[dict[str, object]]:
    data, train = job.datasets["train"], config.train
    batches = epoch_batches(data.lengths, batch_size=train.batch_size, seed=0, epoch=0, num_nodes=1)
    workload = Workload.of(
        batches, global_batch_size=train.batch_size, num_ranks=2, pipeline_lengths=(1, 2), microbatches=None
    )
    profile = measure_profile(job.chain, data, batches=batches, workload=workload, config=config, world=world)
    objective = Objective(data.kind, label_smoothing=0.0, device=world.device)
    stepper = Stepper(job.chain, train, objective=objective, rank=world.rank, needs_norms=False)
    ownership = initial_ownership(job.chain, world)
    layout, rows, step = None, list[dict[str, object]](), 0
    plans = [
        plan_of(schedule, m, config=config, job=job, profile=profile) for schedule in SCHEDULES for m in MICROBATCHES
    ]
    times: dict[ParallelPlan, list[float]] = {plan: [] for plan in plans}
    stages: dict[ParallelPlan, list[float]] = {plan: [] for plan in plans}
    for _ in range(repeats):
        for plan in plans:
            layout, _ = move(
                layout, plan, ownership=ownership, chain=job.chain, train=train, world=world, objective=objective,
                keep_frozen_state=False, recompute=mode,
            )  # fmt: skip
            feed = Feed(job.chain, data, plan, rank=world.rank, store=None, num_workers=0)
            incoming = feed.batches([batches[0]] * 4, epoch=0)
            for number in range(4):  # the first builds the schedule
                batch = next(incoming)
                dist.barrier()
                stepper.seconds = PhaseSeconds()
                start = perf_counter()
                stepper.run(layout, feed, batch, step=step, lr=0.0)
                synchronize(world.device)
                seconds, step = perf_counter() - start, step + 1
                if number:
                    times[plan].append(slowest(seconds))
                    stages[plan].append(stepper.seconds.forward + stepper.seconds.backward)
            incoming.close()
    for plan in plans:
        rows.append(row_of(plan, times[plan], stages[plan], config=config, profile=profile, mode=mode, world=world))
    assert layout is not None
    layout.close()
    return rows


def plan_of(schedule: str, m: int, *, config: Config, job: Job, profile) -> ParallelPlan:  # type: ignore[no-untyped-def]
    constraints = Constraints(
        world_size=2, global_batch_size=config.train.batch_size, schedules=((schedule, 1),), microbatches=m,
        pipeline_lengths=(2,), memory_limit=None,
    )  # fmt: skip
    best, _ = best_plan(
        0, cached=None, costs=profile.job, constraints=constraints, num_blocks=job.chain.num_blocks, calibration={}
    )
    assert best is not None
    return best.plan


def row_of(plan, times, stages, *, config, profile, mode, world) -> dict[str, object]:  # type: ignore[no-untyped-def]
    unit = unit_costs(plan, profile.job, global_batch_size=config.train.batch_size)
    expected = [
        plan.num_microbatches
        * sum(unit.forward_ns[u] + unit.backward_ns[u] + unit.recompute_ns[u] for u in plan.stage_units(stage))
        / 1e9
        for stage in range(2)
    ]
    everyone = [stages] * 2
    dist.all_gather_object(everyone, stages)
    prediction = predict(plan, costs=profile.job, global_batch_size=config.train.batch_size)
    row = {
        "schedule": plan.schedule,
        "M": plan.num_microbatches,
        "checkpoint": mode,
        "boundaries": plan.boundaries,
        "predicted_step_s": prediction.step_seconds,
        "real_step_s": times,
        "step_ratio": prediction.step_seconds / median(times),
        "stage_ratio": [expected[stage] / median(everyone[stage]) for stage in range(2)],
        "bubble": prediction.bubble,
    }
    if world.rank == 0:
        ratios = ", ".join(f"{ratio:.3f}" for ratio in row["stage_ratio"])
        print(
            f"{plan.schedule:6} M {plan.num_microbatches} {mode:7} step {spread([1e3 * t for t in times])} ms, "
            f"predicted over real: step {row['step_ratio']:.3f}, stages {ratios}",
            flush=True,
        )
    return row


if __name__ == "__main__":
    main()
