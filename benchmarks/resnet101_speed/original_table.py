"""The table of ``--scale original``: predicted speed-ups beside the published, an assumption more in every block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.resnet101_speed.original import Prediction, mean_error
from benchmarks.support.graphs import Setting
from benchmarks.support.table import Row, write_table

__all__ = ["rows_of_predictions", "tell_predictions"]


def rows_of_predictions(
    predictions: Sequence[Prediction], settings: Sequence[Setting], *, published: Mapping[str, float]
) -> list[Row]:
    """A block for each assumption, its mean errors below it."""
    base = settings[0].name
    rows: list[Row] = []
    for prediction in predictions:
        by_balance = (prediction.samples_per_s, prediction.best_samples_per_s)
        for setting in settings:
            given, best = (rates[setting.name] / published[base] for rates in by_balance)
            rows.append(
                {
                    "counted": prediction.assumption.name,
                    "experiment": setting.name,
                    "devices": setting.num_devices,
                    "rows": setting.batch_size,
                    "micro-batches": setting.num_microbatches,
                    "checkpoint": setting.checkpoint or "never",
                    "published speed-up": published[setting.name] / published[base],
                    "predicted": given,
                    "error %": 100 * (prediction.samples_per_s[setting.name] / published[setting.name] - 1),
                    "predicted, our cut": best,
                    "error of it %": 100 * (prediction.best_samples_per_s[setting.name] / published[setting.name] - 1),
                }
            )
        errors = [100 * mean_error(rates, published, first=base) for rates in by_balance]
        rows.append(
            {
                **dict.fromkeys(rows[0]),
                "counted": prediction.assumption.name,
                "experiment": "mean error",
                "error %": errors[0],
                "error of it %": errors[1],
            }
        )
    return rows


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
        f"One rate of operations per second is fitted, on {base} alone, for each block: {rates}. The data sheet of a "
        "Tesla P40 has 12e12.",
        "predicted: the original's balance of its layers; our cut: the exact partitioner's for these costs. Mean "
        f"error: of the rows but {base}, signs dropped.",
        "operations: of matrix products and convolutions, counted per unit; memory: operands of all operators, "
        f"each once, of sums of gradients and of SGD, at {by_sheet.memory / 1e9:.0f} GB/s; copies: tensors over each "
        f"cut and their gradients, at {by_sheet.link / 1e9:.2f} GB/s. Each block adds to the one before.",
        "Not timed: nothing ran. Micro-batches are as torch's chunk makes them from the original's numbers.",
    ]


def _draw(figure: Figure, rows: Sequence[Row]) -> None:
    """Speed-ups as bars: the published, then one for each assumption; our cut as a mark."""
    rows = [row for row in rows if row["devices"] is not None]
    names = list(dict.fromkeys(str(row["experiment"]) for row in rows))
    counted = list(dict.fromkeys(str(row["counted"]) for row in rows))
    axes = figure.subplots()
    columns = [("published (P40)", counted[0], "published speed-up")]
    columns += [(f"predicted: {name}", name, "predicted") for name in counted]
    width = 0.8 / len(columns)
    for number, (label, block, key) in enumerate(columns):
        of_block = [row for row in rows if row["counted"] == block]
        places = [at + width * (number - (len(columns) - 1) / 2) for at in range(len(names))]
        heights = [_number(row[key]) for row in of_block]
        bars = axes.bar(places, heights, width=0.92 * width, label=label)
        axes.bar_label(bars, fmt="%.2f", fontsize=6, padding=2)
        if key == "predicted":
            cuts = [_number(row["predicted, our cut"]) for row in of_block]
            axes.plot(places, cuts, "k_", markersize=12, label="with our cut" if number == 1 else None)
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set_xticks(range(len(names)), names)
    axes.set_ylabel(f"speed-up over {names[0]}")
    axes.legend()


def _number(value: str | int | float | None) -> float:
    assert isinstance(value, (int, float))
    return float(value)
