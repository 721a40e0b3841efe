"""Changes by hand: sixteen that an audit planted and no test caught, four bugs from the history, two new guards."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PLANTED", "Planted"]


@dataclass(frozen=True, slots=True)
class Planted:
    """``before``, which stands once in ``path`` (below the package), becomes ``after``."""

    name: str
    path: str
    before: str
    after: str
    tests: tuple[str, ...]


_SAMPLES_PER_S = "samples_per_s={} / seconds if seconds else 0.0"

PLANTED = (
    Planted(
        "AutoFreeze gets the neighbour's norm for every block",
        *("engine/step.py", "self._squares.append(squares[1:-1])", "self._squares.append(squares[:-2])"),
        ("tests/test_units.py",),
    ),
    Planted(
        "ranks go on with plans that differ",
        *("process/agreement.py", "return int(most[0]) == -int(most[1])", "return True"),
        ("tests/test_distributed.py::test_ranks_that_hold_another_plan_are_named",),
    ),
    Planted(
        "a checkpoint waits for a slow disk no longer than a collective may",
        "adapter/groups.py",
        "_set_default_timeout(_WITHOUT_END)",
        "_set_default_timeout(timeout)",
        ("tests/test_slow_disk.py",),
    ),
    Planted(
        "the cache is not forgotten on thawing",
        "cache/controller.py",
        "if self.boundary is not None and frozen < self.boundary:",
        "if self.boundary is not None and frozen < 0:",
        ("tests/test_exactness.py::test_what_thawed_is_not_read_from_the_cache",),
    ),
    Planted(
        "what is stored to evaluate on counts as training",
        "run/totals.py",
        "self.add_train(-advance.evaluation_s)",
        "self.add_train(0.0)",
        ("tests/test_counts.py::test_seconds_add_up",),
    ),
    Planted(
        "training's stores are not found beside other data to evaluate on",
        "cache/earlier.py",
        "(split in TRAINING) == is_first",
        "True == is_first",
        ("tests/test_kept_runs.py::test_what_depends_on_something_else_is_computed",),
    ),
    Planted(
        "all epochs read the first view",
        "cache/views.py",
        "return ids if views in (1, None) else ids + epoch % views * len(dataset)",
        "return ids",
        ("tests/test_counts.py::test_views_are_cached_each_for_itself",),
    ),
    Planted(
        "the worst weights are kept as the best",
        *("run/totals.py", "rank(metrics) > rank(self.best_metrics)", "rank(metrics) < rank(self.best_metrics)"),
        ("tests/test_counts.py",),
    ),
    Planted(
        "what percentile remembers is not saved",
        *("freeze/controller.py", '"before": self._before,', '"before": None,'),
        ("tests/test_freeze.py",),
    ),
    Planted(
        "plans that a resumption undid are replayed",
        "run/replay.py",
        'plans = {step: plan for step, plan in plans.items() if step <= int(event.get("step", 0))}',
        "pass",
        ("tests/test_replay.py",),
    ),
    Planted(
        "dropout drops the same on all ranks and in all steps",
        *("engine/step.py", "_mix(self._train.seed, step, self._rank)", "_mix(self._train.seed)"),
        ("tests/test_phases.py",),
    ),
    Planted(
        "MNLI's matched and mismatched files are swapped",
        *("data/glue.py", '"eval": ("dev_matched.tsv",', '"eval": ("dev_mismatched.tsv",'),
        ("tests/test_splits.py",),
    ),
    Planted(
        "the compute floor counts every step as unfrozen",
        *("run/report.py", "first_active=plan.first_active,", "first_active=0,"),
        ("tests/test_floor.py", "tests/test_counts.py"),
    ),
    Planted(
        "decisions and advance passes are not in train_s",
        "run/report.py",
        "self.totals.add_train(event.seconds)\n        self.totals.transition_s += event.seconds",
        "self.totals.transition_s += event.seconds",
        ("tests/test_floor.py", "tests/test_counts.py"),
    ),
    Planted(
        "an answer that starts inside a word gets the next token",
        "data/questions.py",
        'np.searchsorted(offsets[inside, 0], start, side="right") - 1',
        'np.searchsorted(offsets[inside, 0], start, side="left")',
        ("tests/test_splits.py",),
    ),
    Planted(
        "samples per second are steps per second",
        *("run/step_figures.py", _SAMPLES_PER_S.format("samples"), _SAMPLES_PER_S.format("num_steps")),
        ("tests/test_counts.py",),
    ),
    Planted(
        "gradients are summed a hundred times as often",
        *(
            "run/step_figures.py",
            "self.num_steps / self.seconds if plan.dp",
            "100 * self.num_steps / self.seconds if plan.dp",
        ),
        ("tests/test_counts.py",),
    ),
    Planted(
        "the time of a backward is that of a forward",
        *("run/step_figures.py", '_batch": slowest["backward"]', '_batch": slowest["forward"]'),
        ("tests/test_counts.py",),
    ),
    Planted(
        "padding copies count as hits",
        *("run/steps.py", '"misses"] += batch.num_real', '"misses"] += batch.rows'),
        ("tests/test_counts.py",),
    ),
    Planted(
        "one checkpoint too many is kept",
        *("run/writing.py", "[: -self.keep]", "[: -self.keep - 1]"),
        ("tests/test_counts.py",),
    ),
    Planted(
        "forward and backward change their seconds",
        "engine/step.py",
        "seconds.forward += executor.times.forward\n        seconds.backward += executor.times.backward",
        "seconds.forward += executor.times.backward\n        seconds.backward += executor.times.forward",
        ("tests/test_phases.py",),
    ),
    Planted(
        "every rank plans for its own device",
        *("pipe/controller.py", "smallest(device_memory(world.device))", "device_memory(world.device)"),
        ("tests/test_live.py",),
    ),
    Planted(
        "an optimizer without state has holders of it",
        *("dp/controller.py", "if not has_state(self._config):", "if False:"),
        ("tests/test_resume.py",),
    ),
    Planted(
        "norms of steps before a transition are summed over the ranks behind it",
        *("engine/engine.py", "self.stepper.settle_norms(self._layout)", "pass"),
        ("tests/test_units.py",),
    ),
)
