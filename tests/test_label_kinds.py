"""Tables whose labels are several names, or a number: trained, predicted and judged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from laws import TWO_RANKS, Case, deviation, elastic_run, gradient_deviation
from ranks import RankPool
from test_exactness import reference
from test_extras import run_of, write_requests
from test_readers import texts as table
from tiny import tiny_bert

from pipetransformer import commands
from pipetransformer.errors import UserError
from pipetransformer.inference.samples import _named
from pipetransformer.inference.saved import Saved


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a small BERT."""
    folder = tmp_path_factory.mktemp("texts")
    tiny_bert(folder / "bert", layers=6)
    return str(folder)


@pytest.mark.parametrize("kind", ["labels", "scores"])
def test_tables_of_labels_and_of_numbers(
    kind: str, tmp_path: Path, texts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trained on two ranks, predicted, judged: through the saved folder the same figures as in training."""
    path = write_requests(tmp_path / "asked.csv", label=kind)
    own = (f"data.path={path}", "data.eval_fraction=0.3", f"data.label_kind={kind}", f"model.name={texts}/bert")
    metric = {"labels": "micro_f1", "scores": "pearson"}[kind]
    out, cause = run_of(tmp_path, "table", *own, "train.lr=3e-3", "train.epochs=6", "train.batch_size=8", ranks=2)
    assert cause == "", cause
    summary = json.loads((tmp_path / "x" / "summary.json").read_text())
    assert commands.main(["evaluate", str(tmp_path / "x"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["metrics"][metric] == pytest.approx(summary["best_metrics"][metric], abs=1e-3)
    assert told["confusion"] == [] and [line["name"] for line in told["classes"]] == (
        ["bills", "cards", "loans"] if kind == "labels" else []
    )
    assert commands.main(["predict", str(tmp_path / "x"), str(path), "--json", "--keep", "text"]) == 0
    first = json.loads(capsys.readouterr().out.splitlines()[0])
    assert ({"prediction", "bills"} <= first.keys()) == (kind == "labels")
    assert (first["sample"], first["text"]) == ("1", "about nothing number 0")
    assert commands.main(["predict", str(tmp_path / "x"), str(path), "--keep", "score,text"]) == 2
    assert "--keep: score is a column of the output already" in capsys.readouterr().err
    assert commands.main(["predict", str(tmp_path / "x"), str(path), "--keep", "id"]) == 2
    assert "no column id; there are text, label" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["labels", "scores"])
def test_their_losses_are_plain(kind: str, ranks: RankPool, tmp_path: Path, texts: str) -> None:
    path = write_requests(tmp_path / "asked.csv", label=kind)
    (tmp_path / "bert").symlink_to(f"{texts}/bert")
    table = ("task=text_classification", "data.name=table", f"data.path={path}", "data.eval_fraction=0.3")
    case = Case("bert", 2, TWO_RANKS, cached=True, more=(*table, f"data.label_kind={kind}", "train.label_smoothing=0"))
    weights, gradients = reference(case, str(tmp_path))
    answers = ranks.run(2, elastic_run, case, str(tmp_path), str(tmp_path))
    assert gradient_deviation([g for _, g in answers], gradients) < 1e-10
    assert deviation(answers[0][0], weights) < 1e-10


def test_labels_are_read_as_they_are_written() -> None:
    saved = Saved(Path(), "text_classification", None, {}, None)
    assert _named([0, 1, None, "a", [1, 2]], saved) == ["0", "1", "", "a", "1;2"]


def test_a_column_of_numbers_is_told_how_to_be_predicted(tmp_path: Path) -> None:
    path = write_requests(tmp_path / "asked.csv", label="scores")
    load = {"eval_fraction": 0.3, "text_columns": ("text",), "label_column": "label"}
    with pytest.raises(UserError, match=r"names or whole numbers are needed; .* give data.label_kind=scores"):
        table("table", path, **load)
    path.write_text("text,label\na,1.5\nb,\nc,2.5\n")
    with pytest.raises(UserError, match=r"asked.csv: row 1: there is no number in column label"):
        table("table", path, label_kind="scores", **load)
