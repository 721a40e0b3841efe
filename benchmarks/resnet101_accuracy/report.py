"""The table: errors by row, beside the row that each must agree with, and what chance leaves of their difference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

from matplotlib.figure import Figure
from scipy.stats import t as student

from benchmarks.resnet101_accuracy.network import Recipe
from benchmarks.resnet101_accuracy.sizes import PAIRS, PUBLISHED, Size
from benchmarks.support.graphs import needs
from benchmarks.support.table import Row, write_table

__all__ = ["Comparison", "compare", "rows_of", "tell"]

_CONFIDENCE, _POWER = 0.95, 0.8


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two means (Welch's test).

    Attributes:
        noise: the most that chance makes of the difference in 19 of 20 cases.
        detectable: the true difference that such runs find in 4 of 5 cases.
    """

    difference: float
    noise: float
    detectable: float

    @property
    def is_noise(self) -> bool:
        return abs(self.difference) <= self.noise


def compare(mine: Sequence[float], others: Sequence[float]) -> Comparison | None:
    """None where there are too few runs to know their deviation."""
    if min(len(mine), len(others)) < 2:
        return None
    parts = [stdev(values) ** 2 / len(values) for values in (mine, others)]
    error = sum(parts) ** 0.5
    difference = mean(mine) - mean(others)
    if error == 0:
        return Comparison(difference, 0.0, 0.0)
    # Welch and Satterthwaite's degrees of freedom.
    freedom = sum(parts) ** 2 / sum(part**2 / (len(values) - 1) for part, values in zip(parts, (mine, others)))
    noise, found = (float(student.ppf(share, freedom)) * error for share in ((1 + _CONFIDENCE) / 2, _POWER))
    return Comparison(difference, noise, noise + found)


def rows_of(errors: Mapping[str, Sequence[float]], size: Size, *, world_size: int) -> list[Row]:
    rows: list[Row] = []
    for setting in size.settings:
        runs = errors.get(setting.name, [])
        published = PUBLISHED.get(setting.name)
        other = PAIRS.get(setting.name)
        compared = compare(runs, errors.get(other, [])) if other else None
        rows.append(
            {
                "experiment": setting.name,
                "devices": setting.num_devices,
                "batch": setting.batch_size,
                "micro-batches": setting.num_microbatches if setting.checkpoint else None,
                "seeds": len(runs),
                "top-1 error %": mean(runs) if runs else None,
                "±": stdev(runs) if len(runs) > 1 else None,
                "beside": other if other in errors else None,
                "difference": compared.difference if compared else None,
                "noise": compared.noise if compared else None,
                "detectable": compared.detectable if compared else None,
                "within noise": ("yes" if compared.is_noise else "no") if compared else None,
                "published error % (ImageNet)": "{:.2f} ± {:.2f}".format(*published) if published else None,
                "note": needs(setting, world_size=world_size),
            }
        )
    return rows


def tell(errors: Mapping[str, Sequence[float]], size: Size, *, world_size: int, folder: Path) -> None:
    """Args: errors: top-1 in per cent, of all seeds, by row."""
    rows = rows_of(errors, size, world_size=world_size)
    compared = [row for row in rows if row["within noise"] is not None]
    outside = [str(row["experiment"]) for row in compared if row["within noise"] == "no"]
    verdict = f"Not within noise: {', '.join(outside)}." if outside else "All compared rows are within noise."
    there = size.pictures
    divided = [
        f"Batches are the original's, which name the rows, divided by {size.divisor}; numbers of devices and "
        "micro-batches are the table's own."
    ]
    notes = [
        f"{size.told} on {there.num_train:,} pictures ({there.kind}) for {size.recipe.epochs} epochs, evaluated on "
        f"{there.num_eval:,}; chance is {100 - 100 / there.num_classes:.4g} % error.",
        *(divided if size.divisor > 1 else []),
        "Data parallel: DistributedDataParallel, each replica normalises by its own rows and the first one's running "
        "statistics are kept. Pipelines: GPipe with recomputation of all micro-batches but the last; each micro-batch "
        "normalises by its own rows, and running statistics see the whole batch once.",
        _recipe_note(size.recipe),
        "A row is within noise of the one beside it if their means differ by no more than Welch's t-test leaves to "
        f"chance at {_CONFIDENCE:.0%}: `noise`. Of true differences of `detectable`, {_POWER:.0%} would be found; "
        "smaller ones may hide.",
        "The published errors are of ResNet-101 on ImageNet, 90 epochs"
        + (": not of this task." if size.divisor > 1 else "."),
        verdict if compared else "Too few runs to compare.",
    ]
    write_table(
        "resnet101-accuracy",
        rows,
        title="ResNet-101 accuracy",
        notes=notes,
        draw=lambda figure: draw(figure, rows, errors),
        folder=folder,
    )


def _recipe_note(recipe: Recipe) -> str:
    shape = {
        "original": "warmed up over 4/90 of the run, divided by 10 at 30/90, 60/90 and 80/90",
        "line": "in a line up from 0 over a tenth of the run and down to 0 again",
    }[recipe.schedule]
    return (
        f"Learning rate {recipe.base_rate:g} for batch {recipe.base_batch}, in proportion for larger ones, {shape}; "
        f"momentum {recipe.momentum:g} (Nesterov), weight decay {recipe.weight_decay:g}."
    )


def draw(figure: Figure, rows: Sequence[Row], errors: Mapping[str, Sequence[float]]) -> None:
    """Every run as a point, means with their deviation."""
    axes = figure.subplots()
    names = [str(row["experiment"]) for row in rows]
    for at, (name, row) in enumerate(zip(names, rows)):
        runs = errors.get(name, [])
        axes.plot([at] * len(runs), runs, "o", color="grey", alpha=0.6)
        if runs:
            axes.errorbar(at + 0.15, mean(runs), yerr=row["±"], fmt="s", capsize=4, color="tab:blue")
        else:
            axes.annotate(str(row["note"]), (at, 0.5), xycoords=("data", "axes fraction"), ha="center")
    axes.set_xticks(range(len(names)), [name.replace("-", "-\n").replace(", ", ",\n") for name in names])
    axes.set_ylabel("top-1 error, per cent")
