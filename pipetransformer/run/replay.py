"""The plans of a recorded run, for a replay without decisions."""

from __future__ import annotations

from pathlib import Path

from pipetransformer.errors import UserError
from pipetransformer.plan import ParallelPlan
from pipetransformer.plan.units import Numbering
from pipetransformer.process.world import World
from pipetransformer.run.tracking import read_events


def read_plans(path: str, *, world: World, numbering: Numbering, total_steps: int) -> dict[int, ParallelPlan]:
    """The plans of an ``events.jsonl`` by the step of their adoption, in the units of ``numbering``.

    Args:
        path: the file.
        numbering: the numbering of this job's units.
        total_steps: number of steps of this job.

    Raises:
        UserError: if the file cannot be read, or its plans do not fit this job.
    """
    plans: dict[int, ParallelPlan] = {}
    try:
        events = read_events(Path(path))
    except UserError as error:
        raise UserError(f"run.replay: {error}") from error
    for event in events:
        kind, recorded_steps = event["event"], event.get("total_steps", total_steps)
        if kind == "run" and recorded_steps != total_steps:
            raise UserError(
                f"run.replay: {path} was recorded with {recorded_steps} steps and this job has "
                f"{total_steps}; give the same data, batch size and epochs"
            )
        if kind == "plan":
            try:
                plans[int(event["step"])] = ParallelPlan.from_dict(event["plan"])
            except (KeyError, TypeError, ValueError, AssertionError) as error:
                raise UserError(f"run.replay: {path} holds a plan that cannot be read ({error!r})") from error
        elif kind == "resume":  # the steps after the checkpoint were trained again
            plans = {step: plan for step, plan in plans.items() if step <= int(event.get("step", 0))}
    if 0 not in plans:
        raise UserError(f"run.replay: {path} holds no plan for step 0; give the events.jsonl of a whole run")
    for step, plan in plans.items():
        if plan.world_size != world.size:
            raise UserError(
                f"run.replay: {path} was recorded with {plan.world_size} ranks and this job has {world.size}"
            )
        if world.local_size % plan.pp:
            raise UserError(
                f"run.replay: {path} holds a pipeline of {plan.pp} ranks, and a node, which holds whole pipelines, has "
                f"{world.local_size}; start it on as many nodes as it was recorded on"
            )
        if plan.num_blocks != numbering.num_blocks:
            raise UserError(
                f"run.replay: {path} was recorded with {plan.num_blocks} blocks and this model has "
                f"{numbering.num_blocks}"
            )
        renumbered = plan.renumbered(numbering.units_per_block)
        if renumbered is None:
            raise UserError(f"run.replay: {path} holds a plan that cuts blocks in halves; give pipe.units=half")
        plans[step] = renumbered
    return plans
