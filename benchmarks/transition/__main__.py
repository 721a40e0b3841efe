"""The costs of a transition: 4x1 -> 2x2 -> 1x4 and back (pp x dp), on 4 ranks, all weights and moments in play.

    pipetransformer bench transition [--cycles 4]

Seconds are all that a transition adds to the time from one step's reduction to the next one's, over what that time is
under the new plan otherwise: the move, new groups, the rebuilt stage, its schedule, its first step. They are told in
steps of the faster of both plans. Bytes are compared with the least that could be sent: every weight and moment once
to each rank that trains it and did not hold it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist

from benchmarks.support.command_line import bench_parser
from benchmarks.support.measure import CONFIGS, save, spread
from benchmarks.support.plans import even_plan
from benchmarks.support.ranks import as_ranks
from pipetransformer.config import load_config
from pipetransformer.launch.arguments import count
from pipetransformer.launch.entry import run_guarded
from pipetransformer.plan import ParallelPlan
from pipetransformer.process.device import synchronize
from pipetransformer.process.world import World
from pipetransformer.run.tracking import Transition
from pipetransformer.trainer import Trainer

CONFIG = CONFIGS / "train_config_digits_no_freeze.yaml"
WORLD_SIZE = 4
NUM_BLOCKS = 12
STEPS_PER_PLAN = 5
CYCLE = (4, 2, 1, 2)  # pipeline lengths
# A ViT of 21 M parameters on 32 x 32 pictures in patches of 4.
JOB = (
    *("model.kwargs={patch_size: 4, embed_dim: 384, depth: 12, num_heads: 6}", "data.image_size=32"),
    *("train.batch_size=32", "train.eval_every=1000 epochs", "checkpoint.every=null", "log.wandb=disabled"),
    "run.id=transition",
)


def main() -> None:
    parser = bench_parser("transition", description=__doc__)
    parser.add_argument("--cycles", type=count, default=4, help="times to and fro")
    arguments = parser.parse_args()
    as_ranks(__file__, partial(run, cycles=arguments.cycles), num_ranks=WORLD_SIZE)


def plan_of(pp: int) -> ParallelPlan:
    num_microbatches = 1 if pp == 1 else 4  # what makes a step of each layout fast
    return even_plan(pp, num_ranks=WORLD_SIZE, num_blocks=NUM_BLOCKS, num_microbatches=num_microbatches)


def run(world: World, *, cycles: int) -> None:
    """The job on one rank; rank 0 tells what it cost."""
    lengths = [*CYCLE * cycles, CYCLE[0]]
    plans = {number * STEPS_PER_PLAN: plan_of(pp) for number, pp in enumerate(lengths)}
    probed: list[float] = []

    def note(step: int, gradients: Mapping[str, torch.Tensor]) -> None:
        synchronize(world.device)
        probed.append(perf_counter())
        if step + 1 == len(lengths) * STEPS_PER_PLAN:
            raise StopIteration  # all that was asked for has been measured

    with tempfile.TemporaryDirectory() as folder:
        replay = Path(folder) / "plans.jsonl"
        lines = (json.dumps({"event": "plan", "step": step, "plan": plan.as_dict()}) for step, plan in plans.items())
        replay.write_text("\n".join(lines))
        overrides = (f"run.replay={replay}", f"run.dir={folder}", "train.epochs=100")
        trainer = Trainer(load_config(CONFIG, [*JOB, *overrides]), world, probe=note, timed=False)
        with suppress(StopIteration):
            trainer.run()
        moves = trainer.report.totals.transitions
        unit_bytes = [
            sum(p.numel() * p.element_size() for p in trainer.job.chain.named_parameters([unit]).values())
            for unit in range(trainer.job.chain.num_units)
        ]
    all_probed: list[list[float]] = [[] for _ in range(world.size)]
    dist.all_gather_object(all_probed, probed)
    if world.rank == 0:
        tell(lengths, all_probed, moves, unit_bytes)


def tell(
    lengths: Sequence[int],
    all_probed: Sequence[Sequence[float]],
    moves: Sequence[Transition],
    unit_bytes: Sequence[int],
) -> None:
    """Prints and saves one row for each kind of transition."""
    intervals = [
        max(times[step] - times[step - 1] for times in all_probed) for step in range(1, len(all_probed[0]))
    ]  # intervals[step - 1] ends with step
    usual = {
        pp: median(
            intervals[step - 1]
            for number, length in enumerate(lengths)
            if length == pp
            for step in range(number * STEPS_PER_PLAN + 1, (number + 1) * STEPS_PER_PLAN)
        )
        for pp in set(lengths)
    }
    found: dict[tuple[int, int], list[tuple[float, float, float, float]]] = {}
    for number, move in enumerate(moves, start=1):
        before, after = lengths[number - 1], lengths[number]
        added = intervals[number * STEPS_PER_PLAN - 1] - usual[after]
        fewest = fewest_bytes(plan_of(before), plan_of(after), unit_bytes)
        moved = move.bytes_moved / fewest if fewest else 1.0 + move.bytes_moved
        cost = (added / min(usual[before], usual[after]), added, move.seconds, moved)
        found.setdefault((before, after), []).append(cost)
    rows = []
    for (before, after), costs in found.items():
        steps, added_s, move_s, moved = zip(*costs)
        name = f"{before}x{WORLD_SIZE // before} -> {after}x{WORLD_SIZE // after}"
        rows.append(
            {
                "transition": name,
                "steps": steps,
                "seconds added": added_s,
                "seconds of the move": move_s,
                "bytes over the fewest possible": moved,
                "seconds of a step before and after": (usual[before], usual[after]),
            }
        )
        print(f"{name}, {len(costs)} times; a step is {usual[before]:.2f} s before and {usual[after]:.2f} s after")
        print(f"  in steps of the faster            {spread(steps, digits=2)}")
        print(f"  seconds, of them the move         {spread(added_s)}, {spread(move_s)}")
        print(f"  bytes over the fewest possible    {spread(moved, digits=4)}")
    print(f"saved {save('transition', rows)}")


def fewest_bytes(before: ParallelPlan, after: ParallelPlan, unit_bytes: Sequence[int]) -> int:
    """Weights and both moments of AdamW of every unit that a rank comes to train."""
    return sum(
        3 * unit_bytes[unit]
        for rank in range(WORLD_SIZE)
        for unit in set(after.units_of(rank)) - set(before.units_of(rank))
    )


if __name__ == "__main__":
    sys.exit(run_guarded(main))
