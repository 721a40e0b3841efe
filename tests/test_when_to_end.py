"""The end of a run before its last epoch, and the metric that the best weights are kept by."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from test_readers import texts

from benchmarks.soak.forked import Ended, ForkedJob, running
from pipetransformer.data import Dataset
from pipetransformer.engine.objective import weights_of_classes
from pipetransformer.errors import UserError
from pipetransformer.run.totals import Totals
from pipetransformer.run.tracking import read_events

SETTINGS = (
    *("train.precision=float32", "log.wandb=disabled", "log.report=false", "run.id=x", "pipe.measure=false"),
    *("freeze.policy=none", "data.max_train_samples=64", "data.max_eval_samples=40", "train.batch_size=16"),
    *("train.eval_every=1 epoch", "log.every=1"),
)


def run(folder: Path, *settings: str, ranks: int = 1) -> Ended:
    arguments = ["digits", *SETTINGS, f"run.dir={folder}", *settings]
    job = ForkedJob("image_classification", arguments, num_ranks=ranks)
    with running(job):
        return job.supervise()


def test_a_run_ends_when_nothing_gets_better(tmp_path: Path) -> None:
    """At so large a rate nothing does for long: three evaluations after the best one, by accuracy and then by loss."""
    ended = run(tmp_path, "train.lr=1", "train.epochs=100", "train.early_stopping=3", ranks=2)
    assert ended.exit_code == 0, ended.cause
    told = [e for e in read_events(tmp_path / "x" / "events.jsonl") if e["event"] == "evaluation"]
    ranks = [(event["metrics"]["accuracy"], -event["metrics"]["loss"]) for event in told]
    best = ranks.index(max(ranks))
    assert len(told) == best + 4
    assert json.loads((tmp_path / "x" / "summary.json").read_text())["steps"] == 4 * (best + 4) < 400
    assert (tmp_path / "x" / "model" / "final").is_dir()


def test_patience_counts_from_the_best() -> None:
    totals = Totals()
    for accuracy, waited in ((0.5, 0), (0.4, 1), (0.6, 0), (0.6, 1), (0.1, 2)):
        totals.add_evaluation({"accuracy": accuracy, "loss": 1.0}, by="accuracy")
        assert totals.evaluations_since_best == waited
    assert totals.is_stale(2) and not totals.is_stale(3) and not totals.is_stale(None)


def test_a_run_of_so_many_steps_evaluates_and_saves_at_its_end(tmp_path: Path) -> None:
    ended = run(tmp_path, "train.epochs=5", "train.max_steps=6")
    assert ended.exit_code == 0, ended.cause
    told = read_events(tmp_path / "x" / "events.jsonl")
    assert [e["step"] for e in told if e["event"] == "evaluation"] == [4, 6]
    assert json.loads((tmp_path / "x" / "summary.json").read_text())["steps"] == 6


def test_a_run_that_was_too_short_for_a_guard_goes_on_without_one(tmp_path: Path) -> None:
    """Else samples that it trained on would be set aside."""
    tiny = "model.kwargs={patch_size: 4, in_chans: 1, embed_dim: 16, depth: 2, num_heads: 2}"
    static = ("freeze.policy=static", "freeze.max_frozen=1", "train.eval_every=1000 epochs", "log.every=1000", tiny)
    assert run(tmp_path, *static, "train.epochs=1").exit_code == 0
    longer = run(tmp_path, *static, "train.epochs=65", "run.resume=true")
    assert longer.exit_code == 0, longer.cause
    assert json.loads((tmp_path / "x" / "summary.json").read_text())["steps"] == 260
    assert "no samples are set aside, and no freeze is judged" in longer.out
    fresh = run(tmp_path, *static, "train.epochs=65", "run.id=y")
    assert "of them set aside for the guard" in fresh.out


def test_checkpoints_may_go_with_the_end(tmp_path: Path) -> None:
    ended = run(tmp_path, "train.epochs=2", "checkpoint.keep=0")
    assert ended.exit_code == 0 and not (tmp_path / "x" / "checkpoints").exists()
    told = read_events(tmp_path / "x" / "events.jsonl")
    assert [event["step"] for event in told if event["event"] == "checkpoint"] == [4, 8]
    again = run(tmp_path, "train.epochs=2", "checkpoint.keep=0", "run.resume=auto")
    assert again.exit_code == 0 and "has ended: its 8 steps are done" in again.out


def test_a_metric_that_is_not_measured_is_refused(tmp_path: Path) -> None:
    ended = run(tmp_path, "train.best_by=macro_f1")
    assert ended.cause == "rank 0: train.best_by: macro_f1 is not measured on digits; give accuracy"


def test_tables_have_the_mean_f1_of_all_classes(tmp_path: Path) -> None:
    rows = "".join(f"text {number},{label}\n" for number, label in enumerate("aabc"))
    for name in ("train", "dev"):
        (tmp_path / f"{name}.csv").write_text(f"text,label\n{rows}")
    data = texts("table", tmp_path)["eval"]
    found = data.measure(np.array([0, 0, 1, 1]))
    assert found == {"accuracy": pytest.approx(3 / 4), "macro_f1": pytest.approx((1 + 2 / 3 + 0) / 3)}


class Labels(Dataset):
    def __init__(self, labels: list[int], kind: str = "classes") -> None:
        self.labels, self.kind = torch.tensor(labels), kind  # type: ignore[assignment]

    def inputs(self, *_: object, **__: object) -> dict[str, torch.Tensor]:
        raise NotImplementedError


def test_balanced_weights_are_those_of_scikit_learn() -> None:
    from sklearn.utils.class_weight import compute_class_weight

    labels = [0, 0, 0, 1, 2, 2]
    found = weights_of_classes("balanced", Labels(labels), num_classes=3)
    assert found is not None
    assert found.tolist() == pytest.approx(compute_class_weight("balanced", classes=np.arange(3), y=labels).tolist())
    assert found[torch.tensor(labels)].mean() == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("wanted", "kind", "line"),
    [
        ((1.0, 2.0), "classes", "train.class_weights: 2 weights, and there are 3 classes"),
        ("balanced", "scores", "train.class_weights: the data have scores, no classes; give null"),
    ],
)
def test_weights_that_do_not_fit_are_refused(wanted: object, kind: str, line: str) -> None:
    with pytest.raises(UserError) as caught:
        weights_of_classes(wanted, Labels([0, 1, 2], kind), num_classes=3)  # type: ignore[arg-type]
    assert str(caught.value) == line
