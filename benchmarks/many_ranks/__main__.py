"""Many ranks: transitions of 32 real ranks on this machine, and what one of 1,024 ranks would plan and hold.

    pipetransformer bench many-ranks [--cycles 2]

The real ranks share two cores or so: what a transition takes is told in seconds, and in steps of the plan behind it.
The 1,024 are torch's fake process group: one rank plans its transfers and makes its groups, nothing is sent.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from unittest import mock

import torch.distributed as dist

from benchmarks.support.command_line import bench_parser
from benchmarks.support.measure import CONFIGS, save, spread
from benchmarks.support.plans import even_plan
from benchmarks.support.ranks import as_ranks
from pipetransformer.adapter import group_among
from pipetransformer.config import load_config
from pipetransformer.dp import mesh
from pipetransformer.launch.arguments import count
from pipetransformer.launch.entry import run_guarded
from pipetransformer.process.world import World
from pipetransformer.run.tracking import Transition
from pipetransformer.trainer import Trainer

CONFIG = CONFIGS / "train_config_digits_no_freeze.yaml"
NUM_RANKS, NUM_BLOCKS = 32, 30
STEPS_PER_PLAN = 2
CYCLE = (32, 16, 8, 1, 8, 16)  # pipeline lengths
JOB = (
    *("model.kwargs={patch_size: 4, embed_dim: 32, depth: 30, num_heads: 2}", "data.image_size=16"),
    *("train.batch_size=64", "train.eval_every=1000 epochs", "checkpoint.every=null", "log.wandb=disabled"),
    *("train.epochs=10", "run.id=many", "model.dropout=0"),
)


def main() -> None:
    parser = bench_parser("many-ranks", description=__doc__)
    parser.add_argument("--cycles", type=count, default=2, help="times to and fro")
    arguments = parser.parse_args()
    as_ranks(__file__, partial(run, cycles=arguments.cycles), num_ranks=NUM_RANKS)


plan_of = partial(even_plan, num_ranks=NUM_RANKS, num_blocks=NUM_BLOCKS)


def run(world: World, *, cycles: int) -> None:
    """The job on one rank; rank 0 tells what it cost."""
    lengths = [*CYCLE * cycles, CYCLE[0]]
    plans = {number * STEPS_PER_PLAN: plan_of(pp, num_microbatches=pp) for number, pp in enumerate(lengths)}
    made: list[int] = []

    def noted(ranks: range, **given: object) -> dist.ProcessGroup:
        made.append(len(ranks))
        return group_among(ranks, **given)  # type: ignore[arg-type]

    with tempfile.TemporaryDirectory() as folder, mock.patch.object(mesh, "group_among", noted):
        replay = Path(folder) / "plans.jsonl"
        lines = (json.dumps({"event": "plan", "step": step, "plan": plan.as_dict()}) for step, plan in plans.items())
        replay.write_text("\n".join(lines))
        overrides = (f"run.replay={replay}", f"run.dir={folder}", f"data.max_train_samples={64 * STEPS_PER_PLAN}")
        trainer = Trainer(load_config(CONFIG, [*JOB, *overrides, f"train.epochs={len(lengths)}"]), world, timed=False)
        trainer.run()
        moves = trainer.report.totals.transitions
    groups: list[int] = [0] * world.size
    dist.all_gather_object(groups, len(made))
    if world.rank == 0:
        tell(moves, groups_per_move=max(groups) / len(lengths))


def tell(moves: list[Transition], *, groups_per_move: float) -> None:
    """Prints and saves the real transitions, then the ranks that are not there."""
    found: dict[str, list[float]] = {}
    before = CYCLE[0]
    for move in moves:
        found.setdefault(f"{before}x{NUM_RANKS // before} -> {move.pp}x{move.dp}", []).append(move.seconds)
        before = move.pp
    rows: list[dict[str, object]] = [
        {"what": f"{name}, {NUM_RANKS} ranks", "seconds": seconds, "median seconds": median(seconds)}
        for name, seconds in found.items()
    ]
    for name, seconds in found.items():
        print(f"{name}: {spread(seconds)} s")
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.many_ranks.fake"], capture_output=True, text=True, check=True
    )
    for row in json.loads(ended.stdout):
        print(row)
        rows.append(row)
    notes = [f"A rank makes {groups_per_move:.1f} groups a plan, of those that it is in."]
    print(*notes, f"saved {save('many-ranks', rows, title='Many ranks', notes=notes)}", sep="\n")


if __name__ == "__main__":
    sys.exit(run_guarded(main))
