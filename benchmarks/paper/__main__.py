"""PipeTransformer's own setting, simulated, beside what it published: ablation, alpha, three data sets.

    pipetransformer bench paper

Published figures: He et al., ICML 2021, arXiv 2102.03161, tables 1 to 3. What the simulator assumes: docs/simulator.md.
"""

from __future__ import annotations

import sys

from benchmarks.support.command_line import bench_parser
from benchmarks.support.measure import CONFIGS, save
from pipetransformer.commands.tables import make_console, make_table
from pipetransformer.launch.entry import run_guarded
from pipetransformer.simulation.run import run_simulation
from pipetransformer.simulation.schema import load_simulation

FREE = "pipe.initial_length=null"
STATIC = ["freeze.alpha=0.0", "pipe.cache=false", "pipe.elastic=false", "pipe.replicas=false"]
ABLATION = (
    ("freeze alone", 0.95, ["pipe.cache=false", "pipe.elastic=false", "pipe.replicas=false"]),
    ("freeze + AutoPipe + AutoCache", 1.26, ["pipe.replicas=false"]),
    ("freeze + AutoPipe + AutoDP", 2.27, ["pipe.cache=false"]),
    ("all four", 2.83, []),
)
ALPHAS = (("1/5", 2.04), ("1/4", 2.44), ("1/3", 2.83), ("2/5", 3.29), ("1/2", 3.86))
DATA = (("imagenet", 26.5 * 3600, 2.83), ("cifar100", 35 * 60 + 6, 2.83), ("squad", 5 * 3600 + 7 * 60, 2.10))


def seconds(name: str, *overrides: str) -> float:
    return sum(s.seconds for s in run_simulation(load_simulation(CONFIGS / f"simulation_paper_{name}.yaml", overrides)))


def measure() -> list[dict[str, object]]:
    """One row for each published ratio: ours, and ours against the best static layout."""
    rows: list[dict[str, object]] = []

    def add(table: str, what: str, name: str, published: float, overrides: list[str]) -> None:
        elastic, pipeline, best = (seconds(name, *given) for given in (overrides, STATIC, [*STATIC, FREE]))
        rows.append(
            dict(
                table=table,
                what=what,
                published=published,
                predicted=pipeline / elastic,
                against_best_static=best / elastic,
                elastic_s=elastic,
                pipeline_s=pipeline,
                best_static_s=best,
            )
        )

    for what, published, overrides in ABLATION:
        add("ablation (ImageNet)", what, "imagenet", published, list(overrides))
    for text, published in ALPHAS:
        top, _, bottom = text.partition("/")
        add("alpha (CIFAR-100)", text, "cifar100", published, [f"freeze.alpha={int(top) / int(bottom)}"])
    for name, _, published in DATA:
        add("data", name, name, published, [])
    return rows


def main() -> None:
    bench_parser("paper", description=__doc__).parse_args()
    rows = measure()
    titles = ("table", "what", "published", "predicted", "against the best static layout")
    lines = (
        (
            str(row["table"]),
            str(row["what"]),
            *(f"{row[name]:.2f}" for name in ("published", "predicted", "against_best_static")),
        )
        for row in rows
    )
    console = make_console()
    console.print(make_table(titles, lines, left=titles[:2]))
    for name, published, _ in DATA:
        row = next(row for row in rows if row["what"] == name)
        console.print(f"{name}: baseline {published:,.0f} s published, {row['pipeline_s']:,.0f} s predicted")
    print(f"saved {save('paper', rows)}")


if __name__ == "__main__":
    sys.exit(run_guarded(main))
