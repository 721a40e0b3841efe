"""What the report writes of each event, the figures of some steps from all ranks, and the loss by hand."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from laws import configuration_file
from ranks import RankPool
from test_tracking import PLAN

from pipetransformer.cache import Advance
from pipetransformer.config import load_config
from pipetransformer.data import IGNORED
from pipetransformer.engine import Move, NormSums, Objective, PhaseSeconds
from pipetransformer.engine.executor import StepInput
from pipetransformer.freeze import FreezeDecision, Verdict
from pipetransformer.process.world import World
from pipetransformer.run import events, lines
from pipetransformer.run.folder import RunFolder
from pipetransformer.run.report import Report
from pipetransformer.run.step_figures import StepFigures
from pipetransformer.run.tracking import Tracker

CPU = torch.device("cpu")
PHASES = [field.name for field in fields(PhaseSeconds)]
FIGURES = StepFigures(2, 4.0, 0.5, 0.75, 16.0, 60, 4, [80, 40], {name: [1.0, 2.0] for name in PHASES}, [0.0, 3.0])
TOTALS = {"train_s": 7.0, "wall_s": 100.0, "hits": 3, "transitions": []}
DECISION = FreezeDecision(6, 3, 5, 7, (1.0, 2.0), ((7, 2.0, 0.5),), (0.5, None), "it is so", 0.05)
FREEZING = events.Freezing(True, ((0, 2), (9, PLAN.num_blocks)), True, True)
METRICS = {"accuracy": 0.25, "loss": 2.0}
SAMPLES = Counter({(0, 16): 400})
ADVANCE = Advance(3.0, evaluation_s=0.5, stop=3, samples=SAMPLES, evaluation_samples=90, rounding=0.00625)

# Every event that is written, with the line that it leaves.
LINES: tuple[tuple[events.Event, dict[str, Any]], ...] = (
    (
        events.Resumed(4, "step-00000004", TOTALS),
        {"event": "resume", "step": 4, "resumed_from": "step-00000004", "changes": ["train.lr: 1 -> 2"]},
    ),
    (
        events.TrainingStarts(PLAN, FREEZING),
        {
            **{"event": "run", "run_id": "x", "world_size": 1, "plan": PLAN.as_dict(), "total_steps": 20},
            **{"precision": "float32", "wide_attention": "auto", "views": "auto"},
            "resumed_from": "step-00000004",
        },
    ),
    (
        events.Decided(DECISION),
        {
            **{"event": "freeze_decision", "step": 6, "interval": 3, "frozen": 5, "asked": 7, "norms": [1.0, 2.0]},
            **{"payoffs": [[7, 2.0, 0.5]], "plasticity": [0.5, None], "reason": "it is so", "to_come": 0.05},
        },
    ),
    (
        events.Held(7, 1, 5, "no room"),
        {"event": "held", "step": 7, "frozen": 1, "wanted": 5, "reason": "no room"},
    ),
    (
        events.Adopted(8, PLAN, "measured"),
        {"event": "plan", "step": 8, "plan": PLAN.as_dict(), "reason": "measured"},
    ),
    (
        events.Moved(9, 2, PLAN, PLAN, Move(0.5, 4000), "paper"),
        {
            **{"event": "transition", "step": 9, "epoch": 2, "plan": PLAN.as_dict(), "seconds": 0.5},
            **{"bytes_moved": 4000, "reason": "paper"},
        },
    ),
    (
        events.Advanced(10, 4, ADVANCE, 5000, "host", is_refill=False),
        {
            **{"event": "advance", "step": 10, "boundary": 4, "seconds": 3.0, "samples": 400},
            **{"evaluation_s": 0.5, "evaluation_samples": 90, "found": False, "tier": "host", "rounding": 0.00625},
            "replaces": False,
        },
    ),
    (
        events.CacheDeclined(11, "no memory"),
        {"event": "cache_declined", "step": 11, "reason": "no memory", "boundary": None},
    ),
    (
        events.Logged(12, PLAN, FIGURES),
        {
            **{"event": "steps", "step": 12, "num_steps": 2, "seconds": 4.0, "loss": 0.5, "accuracy": 0.75},
            **{"samples_per_s": 16.0, "hits": 60, "misses": 4},
            "sent_bytes_by_rank": [80, 40],
            "phase_seconds_by_rank": {name: [1.0, 2.0] for name in PHASES},
            "gradient_norms": [0.0, 3.0],
        },
    ),
    (
        events.Evaluated(13, 3, METRICS, 1.5, None),
        {
            **{"event": "evaluation", "step": 13, "epoch": 3, "metrics": METRICS, "best_metrics": METRICS},
            **{"seconds": 1.5, "train_s": 6.5},  # of 7.0, without the advance over what is evaluated
        },
    ),
    (
        events.Watched(Verdict(13, 0.5, 2, True, True, False, 0.4, 0.05), 0.25),
        {
            **{"event": "guard", "step": 13, "loss": 0.5, "most": 2, "judged": True, "undone": True, "flat": False},
            **{"predicted": 0.4, "error": 0.05, "seconds": 0.25},
        },
    ),
    (
        events.Probed((0.1, 0.55, 0.5), 1, 0.0),
        {"event": "probe", "scores": [0.1, 0.55, 0.5], "free": 1, "seconds": 0.0},
    ),
    (
        events.Saved(14, "a/b", 2.0, 3.0),
        {"event": "checkpoint", "step": 14, "path": "a/b", "seconds": 2.0, "write_seconds": 3.0},
    ),
)


@pytest.fixture
def report(tmp_path: Path) -> Iterator[Report]:
    """An open report of a run of one rank, 20 steps, started 50 seconds ago."""
    config = load_config(configuration_file("vit"), (f"run.dir={tmp_path}", "log.wandb=disabled"))
    folder = RunFolder(run_id="x", path=tmp_path, changes=("train.lr: 1 -> 2",))
    world = World(0, 1, 0, 1, CPU)
    with mock.patch("pipetransformer.run.report.perf_counter", lambda: 0.0):
        made = Report(config, world, folder, mock.Mock(total_steps=20), started=-50.0, best_by="accuracy")
    made._tracker = Tracker(config, rank=0, run_dir=tmp_path, run_id="x")
    yield made
    made._tracker.close()


def written(folder: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [{name: value for name, value in line.items() if name != "time"} for line in lines]


@pytest.mark.parametrize(("policy", "expected"), [("guarded", 1), ("paper", 0)])
def test_a_run_without_a_guard_tells_that_little_can_freeze(policy: str, expected: int) -> None:
    config = load_config(configuration_file("vit"), (f"freeze.policy={policy}",))
    freezing = events.Freezing(lacks_guard=True)
    said = list(lines.of_freezing(freezing, config, plan=PLAN, total_steps=200))
    assert said[0].endswith("no freeze is judged: too few steps (200; more than 250 are needed)")
    assert [line for line in said[1:] if "only blocks that the linear probe shows" in line] == said[1:]
    assert len(said) == 1 + expected


def test_where_nothing_will_freeze_it_says_so_and_what_would() -> None:
    config = load_config(configuration_file("vit"), ["freeze.policy=guarded", "freeze.guard=false"])

    def said(freezing: events.Freezing) -> list[str]:
        return list(lines.of_freezing(freezing, config, plan=PLAN, total_steps=400))

    changes = "freeze.guard=false changes nothing: freeze.policy guarded is nothing without it; give another policy"
    assert said(events.Freezing()) == [changes]
    more = "nothing more" if PLAN.frozen else "nothing"
    ends = "; to freeze all the same, give another freeze.policy, as static with freeze.max_frozen"
    assert said(events.Freezing(rests=True))[1:] == [
        f"{more} will freeze: no linear probe shows blocks to be free{ends}"
    ]
    assert said(events.Freezing(rests=True, lacks_guard=True))[-1] == (
        f"{more} will freeze: no linear probe shows blocks to be free, and none that froze later would be judged{ends}"
    )


def test_a_stem_that_tells_all_leaves_nothing_to_be_known_of_blocks() -> None:
    of_all = next(lines.of_probe((0.99, 1.0, 1.0), free=0, seconds=0.5))
    assert "nothing is known of the blocks: start with none of 2 blocks frozen (0.5 s)" in of_all
    assert "do not freeze here" in next(lines.of_probe((0.5, 0.5, 0.4), free=0, seconds=0.5))


def test_every_event_leaves_its_line(report: Report, tmp_path: Path) -> None:
    said: list[str] = []
    report._tracker.line = said.append  # type: ignore[method-assign]
    with mock.patch("pipetransformer.run.report.perf_counter", lambda: 0.0):
        for event, _ in LINES:
            report.hear(event)
        again = (events.Decided(DECISION), events.Held(15, 1, 5, "no room"), events.CacheDeclined(15, "no memory"))
        for event in again:
            report.hear(event)
    assert written(tmp_path) == [*(line for _, line in LINES), LINES[2][1], {**LINES[3][1], "step": 15}], (
        "a cache is declined once"
    )
    assert said[0] == "resumed with another setting: train.lr: 1 -> 2"
    blocks = PLAN.num_blocks
    assert said[2:6] == [
        "freeze.guard: no samples are set aside, and no freeze is judged: too few steps (20; more than 250 are needed)",
        "nothing more will freeze: freeze.warmup, freeze.every and freeze.patience leave too few decisions in this run "
        "that the guard can judge; give a shorter freeze.every, or freeze.guard=false",
        f"blocks to be frozen, of {blocks}: 2 from step 0 on, {blocks} from step 9 on, as far as the guard allows",
        "warning: all blocks freeze at step 9 of 20; the head alone learns from then on, which often costs accuracy; "
        "set freeze.max_frozen, or a longer freeze.every",
    ]
    filled = (
        "step 10: cached 400 samples at block 4 in 3.00 s, 90 to evaluate on in 0.50 s "
        "(0 MB of host memory a node; compute rounds them by 0.62%)"
    )
    assert filled in said
    replaced = events.Advanced(10, 4, replace(ADVANCE, replaces=True), 5000, "host", is_refill=False)
    taken = events.Advanced(10, 4, replace(ADVANCE, is_found=True), 5000, "disk", is_refill=False)
    assert "took over an earlier run's cache at block 4 in 3.00 s" in lines.of_advance(taken, dtype="compute")
    told = lines.of_advance(replaced, dtype="compute")
    assert told.startswith("step 10: an earlier run had cached other activations, now deleted; cached 400 samples")
    assert "step 9: another cut or cache, moved 0.0 MB in 0.500 s (paper)" in said
    undone = "step 13: the freeze is undone: loss of the samples set aside 0.5000, predicted 0.4000 ± 0.0500"
    assert undone in said
    probed = (
        "linear probe: before any training, the blocks hold 50% of what the stem does not tell of the labels: start "
        "with 1 of 2 blocks frozen (0.0 s)"
    )
    number = said.index(probed)
    assert said[number + 2 : number + 4] == ["  behind     stem     1     2", "  explained  0.10  0.55  0.50"]
    asks = (
        "step 6: freeze.policy none asks for 7 frozen blocks (5% of the sum of the learning rates is to come; "
        "predicted: 7 would save 2.0 s for 0.5 s); 5, because "
    )
    for once in (f"{asks}it is so", "AutoFreeze wants 5", "no cache: no memory"):
        assert sum(once in line for line in said) == 1


def test_a_start_tells_its_own_set_up_and_not_that_of_earlier_ones(report: Report) -> None:
    said: list[str] = []
    report._tracker.line = said.append  # type: ignore[method-assign]
    report.hear(events.Resumed(4, "step-00000004", {**TOTALS, "setup_s": 50.0}))
    with mock.patch("pipetransformer.run.report.perf_counter", lambda: report._started + 3.0):
        report.hear(events.TrainingStarts(PLAN, events.Freezing()))
    assert said[-1].endswith("; set-up took 3.0 s") and report.totals.setup_s == 53.0


def test_a_probe_is_a_part_of_training_and_not_of_set_up(report: Report) -> None:
    said: list[str] = []
    report._tracker.line = said.append  # type: ignore[method-assign]
    report.hear(events.Probed((0.1, 0.5), 1, 2.0))
    with mock.patch("pipetransformer.run.report.perf_counter", lambda: report._started + 3.0):
        report.hear(events.TrainingStarts(PLAN, events.Freezing()))
    assert said[-1].endswith("; set-up took 1.0 s")
    assert (report.totals.setup_s, report.totals.train_s) == (1.0, 2.0)


def test_a_look_of_the_guard_that_changes_nothing_is_no_line(report: Report) -> None:
    said: list[str] = []
    report._tracker.line = said.append  # type: ignore[method-assign]
    report.hear(events.Decided(FreezeDecision(6, 3, 0, None, None)))
    assert said == [] and report._decisions == [], "it would end in: because"


@pytest.mark.parametrize(
    ("decision", "before", "settled", "expected"),
    [
        (FreezeDecision(6, 3, 5, 7, None, reason="freeze.max_frozen is 5"), 3, 5, "static"),
        (FreezeDecision(6, 3, 3, 7, None, reason="the guard undoes the last freeze"), 5, 3, "guard"),
        (FreezeDecision(6, 3, 3, None, None, reason="the guard undoes the last freeze"), 5, 3, "guard"),
        (FreezeDecision(0, 0, 3, None, None), 0, 3, "model.lora.blocks"),
        (FreezeDecision(6, 3, 5, 5, None), 3, 3, "measured"),
    ],
)
def test_a_transition_tells_who_causes_it(decision: FreezeDecision, before: int, settled: int, expected: str) -> None:
    assert decision.cause("static", before=before, settled=settled) == expected


def test_a_transition_tells_what_changes(report: Report) -> None:
    said: list[str] = []
    report._tracker.line = said.append  # type: ignore[method-assign]
    for old, new in ((PLAN, replace(PLAN, frozen=PLAN.frozen + 1)), (PLAN, replace(PLAN, num_microbatches=8))):
        report.hear(events.Moved(9, 2, old, new, Move(0.5, 4000), "paper"))
    n, m = PLAN.frozen, PLAN.num_microbatches
    assert [line.split(", moved")[0] for line in said] == [f"step 9: frozen {n} -> {n + 1}", f"step 9: M {m} -> 8"]


def test_totals_go_on_where_a_checkpoint_left_them(report: Report) -> None:
    """100 seconds of wall clock before, 50 since this process began; 60 hits and 4 misses more."""
    with mock.patch("pipetransformer.run.report.perf_counter", lambda: 0.0):
        for event, _ in LINES:
            report.hear(event)
        saved = report.state_dict()
    assert report.resumed_from == "step-00000004"
    assert (saved["wall_s"], saved["train_s"], saved["setup_s"]) == (150.0, 6.5, 50.0)
    assert (saved["hits"], saved["misses"], saved["cache_bytes"], saved["eval_s"]) == (63, 4, {"host": 5000}, 2.0)
    assert saved["metrics"] == saved["best_metrics"] == METRICS
    assert (saved["cache_advance_s"], saved["transition_s"]) == (3.0, -3.5), "its decision's seconds come later"


def test_only_a_better_evaluation_is_the_best(report: Report) -> None:
    for accuracy in (0.5, 0.25, 0.75, 0.6):
        report.hear(events.Evaluated(1, 0, {"accuracy": accuracy, "loss": 1.0}, 1.0, None))
    assert report.totals.best_metrics["accuracy"] == 0.75 and report.totals.metrics["accuracy"] == 0.6


# ---- figures of steps ------------------------------------------------------------------------------------------------


def gathered(world: World) -> StepFigures:
    """Rank r: 2 + r samples, r + 1 right answers, loss 6 or 4, 10 r + 1 hits and r misses, phases 1 .. 7 or 8 .. 14."""
    objective = Objective("classes", label_smoothing=0.0, device=CPU)
    objective._loss_sum += (6.0, 4.0)[world.rank]
    objective._num_correct += world.rank + 1
    objective._num_samples += 2 + world.rank
    phases = PhaseSeconds(*(float(7 * world.rank + number) for number in range(1, 8)))
    return StepFigures.gather(
        objective, phases, NormSums([4.0, 8.0], 4), num_steps=4, seconds=2.0, hits=10 * world.rank + 1,
        misses=world.rank, sent_bytes=80 - 40 * world.rank,
    )  # fmt: skip


def test_figures_are_those_of_all_ranks(ranks: RankPool) -> None:
    one, other = ranks.run(2, gathered)
    assert one == other == StepFigures(
        num_steps=4, seconds=2.0, loss=10 / 5, accuracy=3 / 5, samples_per_s=5 / 2.0, hits=12, misses=1,
        sent_bytes_by_rank=[80, 40],
        phase_seconds_by_rank={name: [float(n), float(n + 7)] for n, name in enumerate(PHASES, start=1)},
        gradient_norms=[1.0, 2.0],
    )  # fmt: skip
    metrics = one.metrics(PLAN, transition_seconds=0.5)
    assert metrics["forward_time_per_batch"] == (10 + 9) / 4 and metrics["backwards_time_per_batch"] == 11 / 4
    assert metrics["cache_hit_rate"] == 12 / 13 and metrics["comm_frequency"] == 0.0, "a single replica"
    assert (metrics["size_params_ddp_sum"], metrics["bandwidth"]) == (120 / 4, 120 / 2.0)
    assert (metrics["gradient_norm/block_0"], metrics["gradient_norm/block_1"]) == (1.0, 2.0)
    assert (metrics["Train/Loss"], metrics["Train/Acc"], metrics["transition_seconds"]) == (2.0, 0.6, 0.5)


def test_no_time_and_no_sample_divide_nothing() -> None:
    figures = StepFigures(1, 0.0, 0.0, 0.0, 0.0, 0, 0, [0], {name: [0.0] for name in PHASES}, NormSums([0.0], 0).mean)
    assert figures.hit_rate is None
    assert figures.metrics(PLAN, transition_seconds=0.0)["comm_frequency"] == 0.0


# ---- the loss --------------------------------------------------------------------------------------------------------

ROWS = torch.tensor([[2.0, 0.0], [0.0, 1.0], [5.0, 5.0]], dtype=torch.float64)


def objective(kind: Any, batch_size: int = 4) -> Objective:
    made = Objective(kind, label_smoothing=0.0, device=CPU)
    made.begin(step=3, batch_size=batch_size)
    return made


def sums(found: Objective) -> tuple[float, int, int]:
    return float(found.loss_sum), int(found.num_correct), int(found.num_samples)


def test_the_loss_of_classes() -> None:
    """Two of four samples of the global batch are here, one of them right, and a copy that does not count."""
    found = objective("classes")
    losses = np.log(1 + np.exp(-2)) + np.log(1 + np.exp(1))
    assert float(found(ROWS, torch.tensor([0, 0, IGNORED]))) == pytest.approx(losses / 4)
    assert sums(found) == (pytest.approx(losses), 1, 2)
    assert int(found.first_bad_step) == -1
    found.clear()
    assert sums(found) == (0.0, 0, 0)


def test_the_loss_of_scores() -> None:
    found = objective("scores")
    assert float(found(ROWS[:, :1], torch.tensor([1.0, 3.0, float(IGNORED)]).double())) == (1 + 9) / 4
    assert sums(found) == (10.0, 0, 2)


def test_the_loss_of_spans() -> None:
    """Three tokens; row 0 has the first right and the last wrong, row 1 both right, row 2 is a copy."""
    first = torch.tensor([[9.0, 0.0, 0.0], [0.0, 9.0, 0.0], [0.0, 0.0, 0.0]])
    last = torch.tensor([[9.0, 0.0, 0.0], [0.0, 0.0, 9.0], [0.0, 0.0, 0.0]])
    labels = torch.tensor([[0, 1], [1, 2], [IGNORED, IGNORED]])
    found = objective("spans", batch_size=2)
    right = np.log(1 + 2 * np.exp(-9))
    loss = (3 * right + right + 9) / 2
    assert float(found(torch.stack([first, last], dim=2), labels)) == pytest.approx(loss / 2)
    assert sums(found) == (pytest.approx(loss), 1, 2)


def test_the_first_step_with_a_bad_loss_is_kept() -> None:
    found = objective("classes")
    for step, value in ((3, 0.0), (4, float("nan")), (5, float("inf"))):
        found.begin(step=step, batch_size=1)
        found(torch.full((1, 2), value), torch.tensor([0]))
    assert found.first_bad_step == 4


def test_a_batch_moves_with_all_its_tensors() -> None:
    batch = StepInput(
        hidden=torch.ones(2, 3), inputs={"mask": torch.ones(2, 4)}, ids=np.arange(2), labels=torch.zeros(2),
        length=4, rows=2, global_count=2, num_real=2, enters=0, is_padded=False,
    )  # fmt: skip
    moved = batch.move(torch.device("meta"))
    assert moved.hidden is not None
    assert all(tensor.is_meta for tensor in (moved.hidden, moved.inputs["mask"], moved.labels))
    batch.hidden = None
    assert batch.move(torch.device("meta")).hidden is None, "a rank without stage 0"
