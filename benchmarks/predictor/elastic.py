"""Predicted over real for every number of frozen blocks, as a job predicts: by costs measured once before training."""

from __future__ import annotations

from statistics import median

from benchmarks.support.measure import spread
from pipetransformer.config import Config
from pipetransformer.config.calendar import Calendar
from pipetransformer.engine import Engine
from pipetransformer.pipe.controller import AutoPipe
from pipetransformer.pipe.measure.static_layouts import time_steps
from pipetransformer.pipe.planner.calibration import Line
from pipetransformer.pipe.planner.constraints import Constraints
from pipetransformer.pipe.planner.search import Prediction, best_plans
from pipetransformer.process.world import World
from pipetransformer.run.job import Job

STEPS = 5  # of a timed round


def of_every_n(config: Config, job: Job, world: World, *, repeats: int) -> list[dict[str, object]]:
    """Collective. A row for each pp and n: the best plan that reads all of its prefix from a cache."""
    batches = job.train_batches(0)
    calendar = Calendar.of(config, batches_per_epoch=len(batches))
    engine = Engine(job.chain, job.datasets, config, world)
    autopipe = AutoPipe(config, chain=job.chain, world=world, calendar=calendar)
    autopipe.measure(engine, batches)
    lines, example = autopipe.lines(), autopipe.workload.examples[autopipe.workload.modal_length]
    chosen = [
        prediction
        for pp in (1, 2)
        for n in range(job.chain.num_blocks + 1)
        if (prediction := best(n, pp, config=config, job=job, autopipe=autopipe, lines=lines)) is not None
    ]
    real: list[list[float]] = [[] for _ in chosen]
    for number in range(repeats):
        for at in list(range(len(chosen)))[:: 1 if number % 2 else -1]:
            engine.enter(chosen[at].plan)
            real[at].append(time_steps(engine, example, num_steps=STEPS))
    engine.forget()
    rows = []
    for prediction, seconds in zip(chosen, real):
        plan, ratios = prediction.plan, [prediction.step_seconds / each for each in seconds]
        if world.rank == 0:
            print(f"pp {plan.pp}, n {plan.frozen}, M {plan.num_microbatches}: {spread(ratios)}", flush=True)
        rows.append(
            {
                "pp": plan.pp,
                "n": plan.frozen,
                "M": plan.num_microbatches,
                "predicted_step_s": prediction.step_seconds,
                "real_step_s": seconds,
                "step_ratio": median(ratios),
                "step_ratios": ratios,
            }
        )
    return rows


def best(n: int, pp: int, *, config: Config, job: Job, autopipe: AutoPipe, lines: dict[int, Line]) -> Prediction | None:
    constraints = Constraints(
        world_size=2,
        global_batch_size=config.train.batch_size,
        schedules=(("1f1b", 1),),
        num_microbatches=None,
        pipeline_lengths=(pp,),
        memory_limit=None,
    )
    found = best_plans(
        n,
        cached=n or None,
        costs=autopipe.profile.job,
        constraints=constraints,
        num_blocks=job.chain.num_blocks,
        lines=lines,
    )
    return found[0] if found else None
