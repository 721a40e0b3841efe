"""Judge the model of a run on data with labels: metrics, a table of the classes, and what is taken for what."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipetransformer.commands.predict import add_sample_arguments
from pipetransformer.commands.tables import make_console, make_table
from pipetransformer.errors import UserError, writing

if TYPE_CHECKING:
    from pipetransformer.inference import Judgement

EXAMPLES = """examples:
  pipetransformer evaluate runs/1000                     on the run's own evaluation data
  pipetransformer evaluate runs/1000 test.csv
  pipetransformer evaluate runs/1001 pictures/test       a folder for each class
  pipetransformer evaluate runs/1000 test.csv --json     for other programs"""
_MOST_CLASSES = 20  # whose confusion a terminal can show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="RUN", type=Path, help="folder of a run, or of a saved model")
    parser.add_argument("data", metavar="DATA", nargs="?", help="table or folder of classes; else the run's own")
    add_sample_arguments(parser)
    parser.add_argument("--label", metavar="COLUMN", help="column of a table's labels; else the run's")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the JSON there, too")


def run(arguments: argparse.Namespace) -> None:
    from pipetransformer.inference import find_saved, open_predictor

    saved = find_saved(arguments.model.expanduser(), which="final" if arguments.final else "best")
    predictor = open_predictor(saved)
    if arguments.data is None:
        found = _of_run(saved, predictor, batch_size=arguments.batch_size)
    else:
        found = _of_data(arguments, saved, predictor)
    told = {
        "model": str(saved.folder),
        "metrics": found.metrics,
        "classes": [{name: getattr(line, name) for name in line.__slots__} for line in found.classes],
        "confusion": found.confusion,
    }
    if arguments.output is not None:
        with writing(arguments.output, key="--output"):
            arguments.output.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    if arguments.json:
        print(json.dumps(told, indent=1))
    else:
        _show(found)


def _of_data(arguments: argparse.Namespace, saved: Any, predictor: Any) -> Judgement:
    from pipetransformer.data.reading import split_labels
    from pipetransformer.inference.judgement import judge, judge_answers, judge_labels, judge_scores
    from pipetransformer.inference.samples import read_samples

    columns = [name for name in arguments.columns.split(",") if name]
    found = read_samples(arguments.data, saved, columns=columns, label=arguments.label, labelled=True)
    told = list(predictor.predict(found.samples, batch_size=arguments.batch_size))
    if saved.task == "question_answering":
        return judge_answers([prediction.label for prediction in told], found.labels)
    if predictor.several:
        labels = [split_labels(prediction.label) for prediction in told]
        return judge_labels(labels, [split_labels(each) for each in found.labels], predictor.names)
    if predictor.names:
        return judge([prediction.label for prediction in told], found.labels, predictor.names)
    try:
        return judge_scores([prediction.score for prediction in told], [float(label) for label in found.labels])
    except ValueError as error:
        raise UserError(f"{arguments.data}: the model gives scores, and a label is none ({error})") from error


def _of_run(saved: Any, predictor: Any, *, batch_size: int) -> Judgement:
    """On the evaluation data that the configuration of its run names."""
    from pipetransformer.inference.own_data import judge_own

    if saved.config is None:
        raise UserError(f"{saved.folder}: lies in no run, whose data would be known; give DATA")
    return judge_own(saved, predictor, batch_size=batch_size)


def _show(found: Judgement) -> None:
    console = make_console()
    console.print(make_table(("metric", "value"), [(name, f"{value:.4f}") for name, value in found.metrics.items()]))
    if not found.classes:
        return
    rows = [(c.name, f"{c.precision:.3f}", f"{c.recall:.3f}", f"{c.f1:.3f}", f"{c.count:,}") for c in found.classes]
    console.print(make_table(("class", "precision", "recall", "f1", "samples"), rows, left=("class",)))
    if not found.confusion:
        return
    if len(found.classes) <= _MOST_CLASSES:
        names = [line.name for line in found.classes]
        confusion = [(name, *map(str, row)) for name, row in zip(names, found.confusion)]
        console.print(make_table(("is \\ called", *names), confusion, left=("is \\ called",)))
        return
    cells = ((count, true, told) for true, row in enumerate(found.confusion) for told, count in enumerate(row))
    worst = sorted((cell for cell in cells if cell[1] != cell[2]), reverse=True)[:10]
    mixed = [(found.classes[true].name, found.classes[told].name, str(count)) for count, true, told in worst if count]
    console.print(make_table(("is", "called", "samples"), mixed, left=("is", "called")))
