"""Predict with the model of a run: a table, texts, pictures, or lines on standard input; CSV or JSON comes out."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from pipetransformer.errors import UserError, writing
from pipetransformer.launch.arguments import count

EXAMPLES = """examples:
  pipetransformer predict runs/1000 new.csv > predictions.csv          rows of a table are numbered from 1
  pipetransformer predict runs/1000 new.csv --keep id --output predictions.csv
  echo "a fine film" | pipetransformer predict runs/1000 -
  pipetransformer predict runs/1001 holiday/ --json --output predictions.json
  pipetransformer predict runs/1000/model/final new.tsv --columns question,context"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="RUN", type=Path, help="folder of a run, or of a saved model")
    parser.add_argument("data", metavar="DATA", help="table, text file, picture, folder of pictures, or - for stdin")
    add_sample_arguments(parser)
    parser.add_argument("--keep", metavar="A,B", default="", help="columns of a table to give back, such as an id")
    parser.add_argument("--json", action="store_true", help="a JSON object a line in place of CSV")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write there, not to standard output")


def add_sample_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of all commands that run a saved model on data."""
    parser.add_argument("--columns", metavar="A,B", default="", help="columns of a table's texts; else the run's")
    parser.add_argument("--final", action="store_true", help="the last weights of a run, not the best")
    parser.add_argument("--batch-size", type=count, default=32, metavar="N", help="samples at once (default 32)")


def run(arguments: argparse.Namespace) -> None:
    from pipetransformer.inference import Prediction, find_saved, open_predictor
    from pipetransformer.inference.samples import read_samples

    saved = find_saved(arguments.model.expanduser(), which="final" if arguments.final else "best")
    columns, kept = ([name for name in text.split(",") if name] for text in (arguments.columns, arguments.keep))
    if taken := sorted({*kept} & {"sample", "prediction", "score"}):
        raise UserError(f"--keep: {taken[0]} is a column of the output already; rename the table's")
    found = read_samples(arguments.data, saved, columns=columns, kept=kept)
    predictor = open_predictor(saved)

    def rows() -> Iterator[dict[str, object]]:
        predictions: Iterator[Prediction] = predictor.predict(found.samples, batch_size=arguments.batch_size)
        for number, (name, prediction) in enumerate(zip(found.names, predictions)):
            row: dict[str, object] = {"sample": name, **{key: values[number] for key, values in found.kept.items()}}
            if prediction.label or predictor.names or saved.task == "question_answering":
                row["prediction"] = prediction.label
            row["score"] = round(prediction.score, 6)
            if twice := sorted({*row} & {*predictor.names}):
                remedy = "leave it out of --keep" if twice[0] in found.kept else "rename the class"
                raise UserError(f"{twice[0]}: a class is called as a column of the output; {remedy}")
            yield row | {name: round(score, 6) for name, score in zip(predictor.names, prediction.scores)}

    with _opened(arguments.output) as file:
        _write(rows(), file, as_json=arguments.json)


@contextmanager
def _opened(path: Path | None) -> Iterator[TextIO]:
    if path is None:
        yield sys.stdout
        return
    with writing(path, key="--output"), path.open("w", encoding="utf-8", newline="") as file:
        yield file


def _write(rows: Iterator[dict[str, object]], file: TextIO, *, as_json: bool) -> None:
    writer: csv.DictWriter[str] | None = None
    for row in rows:
        if as_json:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            continue
        if writer is None:
            writer = csv.DictWriter(file, list(row))
            writer.writeheader()
        writer.writerow(row)
