"""Whole runs, trained as users train them: a configuration's no_freeze and all_in_one files, one after the other.

    pipetransformer bench runs sst2 data.path=SST-2 model.name=minilm-l6
    pipetransformer bench runs squad data.path=squad model.name=minilm-l6
    pipetransformer bench runs cifar100 data.path=cifar100
    pipetransformer bench runs digits

Writes ``FOLDER/runs-NAME.json``, a row for each of the two with its command line and its whole ``summary.json``. A run
that has ended is kept: the same line on the same commit, with no file changed, goes on with the one that is missing
(to train both anew, delete the file). Overrides hold for both; runs lie in ``runs/bench-NAME-...``.

``train s`` are the seconds of training steps; ``wall s`` all of the run: set-up, advances, transitions, evaluations and
checkpoints with them. A run is slower than its twin if it is by either.

``floor over train`` is ``compute_floor_s / train_s``: a run against its own calibrated static step, timed before it
trained. Only beside its twin's, which changes no layout, does it say anything of what being elastic cost.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.support.command_line import add_output, bench_parser
from benchmarks.support.git import ROOT
from benchmarks.support.measure import measured_commit, save
from benchmarks.support.table import text_of
from pipetransformer.errors import UserError
from pipetransformer.launch.arguments import count
from pipetransformer.launch.entry import run_guarded
from pipetransformer.process.device import has_bfloat16

TWINS = ("no_freeze", "all_in_one")
PORT = "29500"
# Of the files' settings, those that two cores cannot afford; and of the second file alone.
SMALL: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "digits": ((), ()),
    "cifar100": (
        (
            *("model.name=vit_tiny_patch16_224", "model.pretrained=false", "model.kwargs={patch_size: 4}"),
            *("data.image_size=32", "data.max_train_samples=4096", "data.max_eval_samples=2000"),
            *("train.batch_size=64", "train.epochs=6", "train.lr=0.01", "pipe.initial_length=2"),
        ),
        (),
    ),
    "sst2": (("train.epochs=1",), ()),
    "squad": ((), ()),
}


@dataclass(frozen=True, slots=True)
class Job:
    """A run to train.

    Attributes:
        run: name of its row, "sst2 no_freeze".
        arguments: those of ``run_pipetransformer.sh``.
    """

    run: str
    run_id: str
    arguments: tuple[str, ...]

    @property
    def command(self) -> str:
        return shlex.join(["sh", "run_pipetransformer.sh", *self.arguments])


def main() -> None:
    parser = bench_parser("runs", description=__doc__)
    parser.add_argument("name", choices=SMALL, help="the pair of configurations")
    parser.add_argument("overrides", metavar="key=value", nargs="*", default=[], help="settings of both runs")
    parser.add_argument("--ranks", type=count, default=2, help="ranks of each run (default 2)")
    add_output(parser)
    arguments = parser.parse_args()
    title, rows = f"{arguments.name}: two runs that differ in freezing alone", list[dict[str, Any]]()
    earlier = kept(arguments.output / f"runs-{arguments.name}.json")
    for job in jobs(arguments.name, num_ranks=arguments.ranks, overrides=arguments.overrides):
        row = earlier.get(job.command)
        if row is not None:
            print(f"{job.run}: kept, trained on {measured_commit()} with the same line", flush=True)
        rows.append(row or {"run": job.run, "command": job.command, **figures(train(job))})
        if len(rows) == 2:
            rows[1] |= beside_the_twin(*rows)
        path = save(f"runs-{arguments.name}", rows, title=title, folder=arguments.output)
    print(table(rows, title=title))
    print(f"saved {path}")


def jobs(name: str, *, num_ranks: int, overrides: Sequence[str]) -> list[Job]:
    both, elastic = SMALL[name]
    # Each of the twins would choose by a timing of its own.
    precision = f"train.precision={'bfloat16' if has_bfloat16(torch.device('cpu')) else 'float32'}"
    found = []
    for twin in TWINS:
        run_id = f"bench-{name}-{twin}"
        own = (precision, *both, *(elastic if twin == TWINS[1] else ()), *overrides, "run.overwrite=true")
        place = (str(num_ranks), "1", "0", "127.0.0.1", PORT, f"config/train_config_{name}_{twin}.yaml", run_id)
        found.append(Job(f"{name} {twin}", run_id, (*place, *own)))
    return found


def train(job: Job) -> dict[str, Any]:
    """Its summary. Run where the user stands, so that paths of overrides mean what they say. Raises UserError where it
    fails."""
    print(job.command, flush=True)
    arguments = [str(ROOT / text) if text.startswith("config/") else text for text in job.arguments]
    ended = subprocess.run(["sh", str(ROOT / "run_pipetransformer.sh"), *arguments])
    if ended.returncode:
        raise UserError(f"{job.run}: the run failed, see above; mend it and give the same line to go on")
    summary: dict[str, Any] = json.loads((Path("runs") / job.run_id / "summary.json").read_text())
    return summary


def kept(path: Path) -> dict[str, dict[str, Any]]:
    """Rows by command line that were trained on this commit; none where files differ from it."""
    if not path.exists() or measured_commit().endswith("-dirty"):
        return {}
    found = json.loads(path.read_text())
    same = found["environment"]["commit"] == measured_commit()
    return {row["command"]: row for row in found["rows"]} if same else {}


def figures(summary: Mapping[str, Any]) -> dict[str, Any]:
    """What tables show of a run, and all of its summary."""
    frozen = [f"{move['frozen']} at {move['step']}" for move in summary["transitions"]]
    return {
        **summary["metrics"],
        "train s": summary["train_s"],
        "wall s": summary["wall_s"],
        "frozen at step": ", ".join(frozen) or None,
        "MB by rank": " ".join(f"{peak / 1e6:.0f}" for peak in summary["peak_memory_bytes"]),
        "floor over train": summary["compute_floor_s"] / summary["train_s"],
        "summary": summary,
    }


def beside_the_twin(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, float | str]:
    """The second row's figures that stand over the first one's, or beside them, and whether it was slower."""
    train, wall = (second[key] / first[key] for key in ("train s", "wall s"))
    return {
        "train s over the twin's": train,
        "wall s over the twin's": wall,
        "slower than the twin": "no" if max(train, wall) <= 1 else "yes",
        "floor over train of the twin": first["floor over train"],
        "floor over train, over the twin's": second["floor over train"] / first["floor over train"],
    }


def table(rows: Sequence[Mapping[str, Any]], *, title: str) -> str:
    """Figures down, the two runs side by side."""
    names = [name for name in rows[1] if name not in ("run", "command", "summary")]
    lines = [{"figure": name, **{row["run"]: row.get(name) for row in rows}} for name in names]
    return text_of(list(lines[0]), lines, title=title, notes=[])


if __name__ == "__main__":
    sys.exit(run_guarded(main))
