"""The table of ``--scale original``: predicted speed-ups beside the published, an assumption more in every column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.resnet101_speed.original import Prediction, mean_error
from benchmarks.support.graphs import Setting
from benchmarks.support.table import Row, write_table

__all__ = ["OUR_CUT", "rows_of_predictions", "tell_predictions"]

OUR_CUT = "our cut"


def rows_of_predictions(
    predictions: Sequence[Prediction], settings: Sequence[Setting], *, published: Mapping[str, float]
) -> list[Row]:
    """One for each setting: speed-ups by assumption, then that of our cut under the last, which nobody published and so
    has no error; the mean errors below."""
    base, last = settings[0].name, predictions[-1]
    rows: list[Row] = [
        {
            "experiment": setting.name,
            "devices": setting.num_devices,
            "rows": setting.batch_size,
            "micro-batches": setting.num_microbatches,
            "checkpoint": setting.checkpoint or "never",
            "published": published[setting.name] / published[base],
            **{each.assumption.name: each.samples_per_s[setting.name] / published[base] for each in predictions},
            OUR_CUT: last.best_samples_per_s[setting.name] / published[base],
        }
        for setting in settings
    ]
    found = {each.assumption.name: each.samples_per_s for each in predictions}
    errors = {name: 100 * mean_error(rates, published, first=base) for name, rates in found.items()}
    return [*rows, {**dict.fromkeys(rows[0]), "experiment": "mean error %", **errors}]


def tell_predictions(
    name: str,
    predictions: Sequence[Prediction],
    settings: Sequence[Setting],
    *,
    published: Mapping[str, float],
    title: str,
    notes: Sequence[str],
    folder: Path,
) -> None:
    """Writes ``FOLDER/NAME-original.json`` and ``.png``."""
    rows = rows_of_predictions(predictions, settings, published=published)
    write_table(
        f"{name}-original",
        rows,
        title=f"{title} at the original's size, predicted",
        notes=[*_notes(predictions, settings), *notes],
        draw=lambda figure: _draw(figure, rows),
        folder=folder,
    )


def _notes(predictions: Sequence[Prediction], settings: Sequence[Setting]) -> list[str]:
    rates = ", ".join(f"{each.assumption.name} {each.operations_per_s / 1e12:.2f}e12" for each in predictions)
    base, by_sheet = settings[0].name, predictions[2].assumption
    return [
        f"One rate of operations per second is fitted, on {base} alone, for each column: {rates}. The data sheet of a "
        "Tesla P40 has 12e12.",
        "Speed-ups over the first row, with the original's balance of its layers; our cut: the exact partitioner's for "
        f"the costs of the column before it. Mean error: of the rows but {base}, signs dropped.",
        "operations: of matrix products and convolutions, counted per unit; memory: operands of all operators, "
        f"each once, of sums of gradients and of SGD, at {by_sheet.memory / 1e9:.0f} GB/s; copies: tensors over each "
        f"cut and their gradients, at {by_sheet.link / 1e9:.2f} GB/s. Each column adds to the one before.",
        "Not timed: nothing ran. Micro-batches are as torch's chunk makes them from the original's numbers.",
    ]


def _draw(figure: Figure, rows: Sequence[Row]) -> None:
    """Speed-ups as bars: the published, then one for each assumption; our cut as a mark on the last."""
    rows = rows[:-1]
    names, columns = [str(row["experiment"]) for row in rows], list(rows[0])[list(rows[0]).index("published") : -1]
    axes = figure.subplots()
    width = 0.8 / len(columns)
    for number, column in enumerate(columns):
        places = [at + width * (number - (len(columns) - 1) / 2) for at in range(len(names))]
        label = f"predicted: {column}" if number else "published (P40)"
        bars = axes.bar(places, [_number(row[column]) for row in rows], width=0.92 * width, label=label)
        axes.bar_label(bars, fmt="%.2f", fontsize=6, padding=2)
    axes.plot(places, [_number(row[OUR_CUT]) for row in rows], "k_", markersize=12, label=OUR_CUT)
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set_xticks(range(len(names)), names)
    axes.set_ylabel(f"speed-up over {names[0]}")
    axes.legend()


def _number(value: str | int | float | None) -> float:
    assert isinstance(value, (int, float))
    return float(value)
