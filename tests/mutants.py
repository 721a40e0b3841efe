"""Small changes to the core, one at a time, and whether the default tests catch them.

    python tests/mutants.py [--seed 0] [--only WORD ...] [--results FILE] [--list]

Sixty mutants: the 20 of ``planted_mutants.py``, and 40 that ``drawn_mutants.py`` finds in the files below, ten of each
operator, drawn by the seed. Each is made in a copy of the repository, with nothing beside it, and meets the default
tests that belong to its file, cheap ones first, until one fails. Before, those tests must pass on the unchanged copy.
A mutant whose tests take longer than ``TIMEOUT`` is caught, a job that hangs being noticed, if the same tests pass in
half of that without it.

With ``--results`` each outcome is a line of a file, and the same command goes on where it was stopped: what was caught
is not run again while its file and its tests stay as they are. Exit code 1 where more than three survive.
"""

from __future__ import annotations

import argparse
import compileall
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from py_compile import PycInvalidationMode

import psutil
from drawn_mutants import OPERATORS, changes
from planted_mutants import PLANTED

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "pipetransformer"
NUM_OF_OPERATOR, MOST_SURVIVORS, TIMEOUT = 10, 3, 300.0

_EXACT = "tests/test_exactness.py::test_"
_DIVERGING = "tests/test_bad_input.py::test_a_loss_that_is_not_finite_ends_the_run"
_LAW = ("tests/test_resume.py::test_resumed_is_undisturbed", f"{_EXACT}what_thawed_is_not_read_from_the_cache")
_COUNTS = ("tests/test_counts.py", "tests/test_phases.py")
_ENGINE = (*_COUNTS, *_LAW, f"{_EXACT}every_schedule_is_plain")
_FREEZE = ("tests/test_freeze.py",)
_PLAN = ("tests/test_plan.py", "tests/test_planner.py", "tests/test_schedules.py", *_LAW)
_PLANNER = ("tests/test_planner.py", "tests/test_settle.py", "tests/test_simulator.py", "tests/test_units.py")
# A test of seconds fails on a machine at work, whatever the mutant.
_TIMED = "tests/test_simulation.py::test_a_plan_for_1024_ranks_takes_less_than_a_second"
_RUN = ("tests/test_floor.py", "tests/test_report.py", *_COUNTS)

# The core: what decides which weights a run ends with, and what it tells. By file, the default tests that watch it.
TESTS: dict[str, tuple[str, ...]] = {
    "config/calendar.py": ("tests/test_calendar.py", *_COUNTS),
    "data/batches.py": ("tests/test_batch_plan.py", "tests/test_cache.py", *_LAW),
    "freeze/controller.py": _FREEZE,
    "freeze/paper.py": _FREEZE,
    "freeze/percentile.py": _FREEZE,
    "plan/parallel_plan.py": _PLAN,
    "plan/prefix.py": ("tests/test_plan.py", "tests/test_settle.py", "tests/test_planner.py"),
    "plan/schedules.py": _PLAN,
    "plan/units.py": ("tests/test_plan.py", "tests/test_units.py", "tests/test_halves.py"),
    "pipe/planner/choice.py": _PLANNER,
    "pipe/planner/costs.py": ("tests/test_floor.py", "tests/test_links.py", *_PLANNER, "tests/test_simulation.py"),
    "pipe/planner/memory.py": ("tests/test_planner.py", "tests/test_memory.py"),
    "pipe/planner/microbatches.py": _PLANNER,
    "pipe/planner/partition.py": ("tests/test_partition.py", *_PLANNER),
    "pipe/planner/search.py": _PLANNER,
    "pipe/planner/step_simulator.py": _PLANNER,
    "dp/controller.py": ("tests/test_resume.py", "tests/test_live.py", *_LAW),
    "dp/mesh.py": ("tests/test_optim.py", *_LAW),
    "dp/optimizer_state.py": ("tests/test_optim.py", *_LAW, "tests/test_resume.py"),
    "dp/buckets.py": ("tests/test_reducer.py", *_LAW),
    "dp/reducer.py": ("tests/test_reducer.py", *_LAW),
    "dp/transfer.py": ("tests/test_transfer.py",),
    "cache/advance.py": ("tests/test_resume.py", *_ENGINE),
    "cache/controller.py": ("tests/test_offers.py", *_ENGINE),
    "cache/reader.py": ("tests/test_cache.py",),
    "cache/store.py": ("tests/test_cache.py",),
    "engine/evaluate.py": (*_COUNTS, "tests/test_evaluate.py", "tests/test_tasks.py"),
    "engine/executor.py": _ENGINE,
    "engine/feed.py": _ENGINE,
    "engine/layout.py": (*_ENGINE, "tests/test_recompute.py"),
    "engine/objective.py": ("tests/test_report.py", *_ENGINE),
    "engine/optim.py": ("tests/test_optim.py", *_LAW),
    "engine/step.py": (*_COUNTS, "tests/test_units.py", "tests/test_live.py", *_LAW),
    "run/checkpoint.py": (*_COUNTS, "tests/test_resume.py", "tests/test_units.py"),
    "run/compute_floor.py": ("tests/test_floor.py",),
    "run/replay.py": ("tests/test_replay.py", "tests/test_units.py"),
    "run/report.py": _RUN,
    "run/step_figures.py": _RUN,
    "run/steps.py": (
        *_RUN,
        "tests/test_replan.py",
        "tests/test_live.py",
        _DIVERGING,
    ),
    "run/totals.py": _RUN,
}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One changed file of the package. ``path`` is below it; ``text`` is the whole new text."""

    name: str
    path: str
    text: str
    tests: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Of the new text and of its tests: a result is of no use once these are others."""
        digest = hashlib.sha256(self.text.encode())
        for name in sorted({test.partition("::")[0] for test in self.tests} | {"tests/laws.py", "tests/ranks.py"}):
            digest.update((ROOT / name).read_bytes())
        return digest.hexdigest()[:12]


def planted() -> list[Mutant]:
    """The changes by hand. Raises ValueError for one whose text is gone from its file."""
    made = []
    for one in PLANTED:
        source = source_of(one.path)
        if source.count(one.before) != 1:
            raise ValueError(f"{one.name}: {one.before!r} stands {source.count(one.before)} times in {one.path}")
        made.append(Mutant(one.name, one.path, source.replace(one.before, one.after), one.tests))
    return made


def drawn(seed: int) -> list[Mutant]:
    """Ten changes of each operator, all different, in the order of files and lines."""
    draws = random.Random(seed)
    found = [(path, change) for path in TESTS for change in changes(source_of(path))]
    chosen = []
    for operator in OPERATORS:
        chosen += draws.sample([one for one in found if one[1].operator == operator], NUM_OF_OPERATOR)
    made = []
    for path, change in sorted(chosen, key=lambda one: (list(TESTS).index(one[0]), one[1].start)):
        before, after = (re.sub(r"\s+", " ", text) for text in (change.before, change.after))
        column = change.start - source_of(path).encode().rfind(b"\n", 0, change.start)
        name = f"{path}:{change.line}:{column} {change.operator}: {before} -> {after}"
        made.append(Mutant(name, path, change.applied(source_of(path)), TESTS[path]))
    return made


def source_of(path: str) -> str:
    return (ROOT / PACKAGE / path).read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Outcome:
    """``by``: the first test that failed, or "timeout"; None for a survivor."""

    by: str | None
    seconds: float


class Copy:
    """A copy of the repository's files in ``folder``. Changed files are seen at once: byte code goes by content."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, check=True, capture_output=True, text=True,
        )  # fmt: skip
        for name in listed.stdout.splitlines():
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, folder / name)
        compileall.compile_dir(folder / PACKAGE, quiet=1, invalidation_mode=PycInvalidationMode.CHECKED_HASH)

    def outcome(self, mutant: Mutant) -> Outcome:
        path = self.folder / PACKAGE / mutant.path
        kept = path.read_text(encoding="utf-8")
        path.write_text(mutant.text, encoding="utf-8")
        try:
            outcome = self.run(mutant.tests, timeout=TIMEOUT)
        finally:
            path.write_text(kept, encoding="utf-8")
        if outcome.by == "timeout" and (without := self.run(mutant.tests, timeout=TIMEOUT / 2)).by is not None:
            raise RuntimeError(f"{mutant.name}: its tests take too long without it ({without.seconds:.0f} s)")
        return outcome

    def run(self, tests: Sequence[str], *, timeout: float | None) -> Outcome:
        """Runs ``tests`` until one fails. Raises RuntimeError where pytest itself is asked in vain."""
        environment = {**os.environ, "PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--deselect", _TIMED, *tests]
        start = time.monotonic()
        with subprocess.Popen(
            command, cwd=self.folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process:
            try:
                told, _ = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                _end(process.pid)
                return Outcome("timeout", time.monotonic() - start)
        seconds = time.monotonic() - start
        if process.returncode == 0:
            return Outcome(None, seconds)
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", told, flags=re.MULTILINE)
        if process.returncode in (4, 5) or not failed and process.returncode != 2:
            raise RuntimeError(f"pytest ended with {process.returncode}:\n{told[-2000:]}")
        return Outcome(failed[0] if failed else "import", seconds)


def _end(pid: int) -> None:
    """Kills a process and all that it has started."""
    process = psutil.Process(pid)
    for one in (*process.children(recursive=True), process):
        one.kill()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="plants small changes, and runs the tests that should catch them")
    parser.add_argument("--seed", type=int, default=0, help="of the drawn mutants")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="mutants whose name holds one of these")
    parser.add_argument("--results", type=Path, help="a file of results, one a line; what it says is caught is not run")
    parser.add_argument("--list", action="store_true", help="name the mutants and stop")
    given = parser.parse_args(arguments)
    mutants = [*planted(), *drawn(given.seed)]
    chosen = [one for one in mutants if not given.only or any(word in one.name for word in given.only)]
    if given.list:
        print(*(one.name for one in chosen), sep="\n")
        return 0
    known = _known(given.results)
    survivors = []
    with tempfile.TemporaryDirectory(prefix="mutants_") as folder:
        copy = Copy(Path(folder).resolve())
        missing = [one for one in chosen if (one.name, one.digest) not in known]
        tests = list(dict.fromkeys(test for one in missing for test in one.tests))
        if tests and (broken := copy.run(tests, timeout=None)).by is not None:
            print(f"error: {broken.by} fails without any mutant", file=sys.stderr)
            return 2
        for number, mutant in enumerate(chosen, start=1):
            outcome = known.get((mutant.name, mutant.digest)) or copy.outcome(mutant)
            if (mutant.name, mutant.digest) not in known and given.results is not None:
                record = {"name": mutant.name, "digest": mutant.digest, "by": outcome.by, "seconds": outcome.seconds}
                with given.results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")
            told = f"caught by {outcome.by}" if outcome.by else "SURVIVED"
            print(f"{number}/{len(chosen)} {mutant.name}: {told} ({outcome.seconds:.0f} s)", flush=True)
            survivors += [] if outcome.by else [mutant.name]
    print(f"seed {given.seed}: {len(chosen) - len(survivors)} of {len(chosen)} caught", *survivors, sep="\nsurvived: ")
    return int(len(survivors) > MOST_SURVIVORS)


def _known(results: Path | None) -> dict[tuple[str, str], Outcome]:
    """What was caught, by name and digest."""
    if results is None or not results.exists():
        return {}
    lines = map(json.loads, results.read_text(encoding="utf-8").splitlines())
    return {(one["name"], one["digest"]): Outcome(one["by"], one["seconds"]) for one in lines if one["by"]}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
