"""PipeTransformer's own setting, simulated, beside what it published: ablation, alpha, three data sets.

    pipetransformer bench paper

Published figures: He et al., ICML 2021, arXiv 2102.03161, tables 1 to 3. Nothing is timed. What the simulator assumes:
docs/simulator.md; what the columns assume: benchmarks/paper/assumptions.py.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import mean

from matplotlib.figure import Figure

from benchmarks.paper.assumptions import ASSUMPTIONS, FREE, STATIC, Assumption, fitted_rate, seconds
from benchmarks.support.command_line import add_output, bench_parser
from benchmarks.support.table import Row, write_table
from pipetransformer.launch.entry import run_guarded

ABLATION = (
    ("freeze alone", 0.95, ("pipe.cache=false", "pipe.elastic=false", "pipe.replicas=false")),
    ("freeze + AutoPipe + AutoCache", 1.26, ("pipe.replicas=false",)),
    ("freeze + AutoPipe + AutoDP", 2.27, ("pipe.cache=false",)),
    ("all four", 2.83, ()),
)
ALPHAS = (("1/5", 2.04), ("1/4", 2.44), ("1/3", 2.83), ("2/5", 3.29), ("1/2", 3.86))
DATA = (("imagenet", 26.5 * 3600, 2.83), ("cifar100", 35 * 60 + 6, 2.83), ("squad", 5 * 3600 + 7 * 60, 2.10))
BASELINE = {name: seconds for name, seconds, _ in DATA}
TEST_SAMPLES = {"imagenet": 50_000, "cifar100": 10_000, "squad": 10_784}
"""Of the sets that are commonly evaluated; SQuAD's 10,570 questions are 10,784 windows of 384 tokens."""
_CIFAR_SAMPLES = 10 * 50_000
# The fastest published run of pictures: alpha 1/2. Reading gives at least its mean rate.
READING = _CIFAR_SAMPLES / (BASELINE["cifar100"] / ALPHAS[-1][1])


@cache
def rate_of(name: str, assumption: Assumption) -> float | None:
    if not assumption.fits_rate:
        return None
    return fitted_rate(name, BASELINE[name], assumption=assumption, test_samples=TEST_SAMPLES[name])


def run_seconds(name: str, overrides: Sequence[str], assumption: Assumption) -> float:
    return seconds(
        name,
        overrides,
        assumption=assumption,
        test_samples=TEST_SAMPLES[name],
        samples_per_s=None if name == "squad" else READING,
        rate=rate_of(name, assumption),
    )


def row_of(table: str, what: str, name: str, published: float, overrides: Sequence[str]) -> Row:
    """A published gain over the run without freezing, and ours under each assumption."""
    row: dict[str, str | int | float | None] = {"table": table, "what": what, "published": published}
    for assumption in ASSUMPTIONS:
        elastic, static = (run_seconds(name, given, assumption) for given in (overrides, STATIC))
        row[assumption.name] = static / elastic
    planned = ASSUMPTIONS[0]
    elastic, static, best = (run_seconds(name, given, planned) for given in (overrides, STATIC, [*STATIC, FREE]))
    return row | {
        "planned, over the best static layout": best / elastic,
        "elastic_s": elastic,
        "pipeline_s": static,
        "best_static_s": best,
    }


def measure() -> list[Row]:
    """One row for each published gain."""
    rows = [row_of("ablation (ImageNet)", what, "imagenet", gain, given) for what, gain, given in ABLATION]
    for text, gain in ALPHAS:
        top, _, bottom = text.partition("/")
        rows.append(row_of("alpha (CIFAR-100)", text, "cifar100", gain, [f"freeze.alpha={int(top) / int(bottom)}"]))
    return rows + [row_of("data", name, name, gain, []) for name, _, gain in DATA]


def notes_of(rows: Sequence[Row]) -> list[str]:
    alphas = [row for row in rows if str(row["table"]).startswith("alpha")]
    factors = []
    for assumption in ASSUMPTIONS:
        ratios = [_number(row, assumption.name) / _number(row, "published") for row in alphas]
        factors.append(f"{assumption.name} {mean(ratios):.2f} ({min(ratios):.2f} .. {max(ratios):.2f})")
    baselines = [
        f"{name} {published:,.0f} s published, "
        f"{next(_number(row, 'pipeline_s') for row in rows if row['what'] == name):,.0f} s predicted"
        for name, published, _ in DATA
    ]
    fitted = [f"{name} {(rate_of(name, ASSUMPTIONS[-1]) or 0) / 1e12:.2f}e12" for name, _, _ in DATA]
    return [
        f"Predicted over published, mean and range over the five alphas: {'; '.join(factors)}.",
        "Each column adds to the one before. planned: our planner, 5.5e12 operations per second. halving: the pipeline "
        "halves when no rank gets more active blocks than it had at the start. rate: as fits the run without freezing. "
        "evaluation: the test set after every epoch. reading: at most the mean rate of the published run of alpha 1/2, "
        f"{READING:.0f} pictures/s, so that this row is no check of it.",
        f"Without freezing, planned: {'; '.join(baselines)}. Fitted there: {', '.join(fitted)} operations per second.",
    ]


def draw(figure: Figure, rows: Sequence[Row]) -> None:
    """Every published gain against ours, and how the alphas come out."""
    left, right = figure.subplots(1, 2)
    names = ["published", *(assumption.name for assumption in ASSUMPTIONS)]
    alphas = [row for row in rows if str(row["table"]).startswith("alpha")]
    for name in names:
        style = {"color": "black", "linewidth": 2} if name == "published" else {}
        left.plot(
            [str(row["what"]) for row in alphas], [_number(row, name) for row in alphas], "o-", label=name, **style
        )
    left.set(xlabel="alpha (CIFAR-100)", ylabel="gain over no freezing", ylim=(0, None))
    left.legend()
    for name in names[1:]:
        right.plot([_number(row, "published") for row in rows], [_number(row, name) for row in rows], "o", label=name)
    most = max(_number(row, name) for row in rows for name in names)
    right.plot([0, most], [0, most], color="black", linewidth=0.8)
    right.set(xlabel="published gain", ylabel="predicted gain, all rows")


def _number(row: Row, name: str) -> float:
    value = row[name]
    assert isinstance(value, (int, float)), name
    return float(value)


def write(folder: Path) -> None:
    rows = measure()
    title = "PipeTransformer's published gains, simulated"
    write_table("paper", rows, title=title, notes=notes_of(rows), draw=lambda to: draw(to, rows), folder=folder)


def main() -> None:
    parser = bench_parser("paper", description=__doc__)
    add_output(parser)
    write(parser.parse_args().output)


if __name__ == "__main__":
    sys.exit(run_guarded(main))
