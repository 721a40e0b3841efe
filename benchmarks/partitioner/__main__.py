"""The exact partitioner beside torchgpipe's block partition, on the same costs.

    pip install -e ".[bench]"
    pipetransformer bench partitioner [--chains 2000]

Both cut a chain into contiguous stages, communication left out, which torchgpipe does not know. A ratio is the slowest
stage of torchgpipe's cut over that of ours: 1 is a draw, and no exact cut comes below it. Costs are lognormal(0, 1), of
2 to 64 units into 1 to 16 stages; or as in chains that are trained: 6, 12 or 24 blocks of equal cost up to 1 % or 5 %,
behind a stem and before a head of at most a quarter of a block.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from random import Random
from statistics import median
from time import perf_counter

from matplotlib.figure import Figure

from benchmarks.support.command_line import add_output, bench_parser
from benchmarks.support.table import Row, write_table
from benchmarks.support.torchgpipe import require_torchgpipe
from pipetransformer.launch.arguments import count
from pipetransformer.launch.entry import run_guarded
from pipetransformer.pipe.planner.partition import partition, stage_costs

_BLOCK = 10**6
_MUCH = 1.01

Chain = tuple[list[int], int]
"""Costs of units, and the number of stages."""


def random_chain(random: Random) -> Chain:
    num_units = random.randint(2, 64)
    num_stages = random.randint(1, min(16, num_units))
    return [round(_BLOCK * random.lognormvariate(0.0, 1.0)) for _ in range(num_units)], num_stages


def trained_chain(random: Random, *, tolerance: float, num_stages: int) -> Chain:
    """Args: tolerance: of a block's cost, to both sides."""
    blocks = [_BLOCK * random.uniform(1 - tolerance, 1 + tolerance) for _ in range(random.choice((6, 12, 24)))]
    stem, head = (_BLOCK * random.uniform(0.0, 0.25) for _ in range(2))
    return [round(cost) for cost in (stem, *blocks, head)], num_stages


def compare(name: str, chains: Iterator[Chain]) -> Row:
    from torchgpipe.balance import blockpartition  # not installed with the project

    ratios, ours_s, theirs_s = list[float](), 0.0, 0.0
    for costs, num_stages in chains:
        start = perf_counter()
        cut = partition(costs, num_stages=num_stages)
        middle = perf_counter()
        blocks = blockpartition.solve(costs, partitions=num_stages)
        ours_s, theirs_s = ours_s + middle - start, theirs_s + perf_counter() - middle
        assert cut is not None
        ratios.append(max(sum(block) for block in blocks) / max(stage_costs(costs, cut)))
    return {
        "costs": name,
        "chains": len(ratios),
        "worse": sum(ratio < 1.0 for ratio in ratios),
        "better %": 100 * sum(ratio > 1.0 for ratio in ratios) / len(ratios),
        "by > 1 %": 100 * sum(ratio > _MUCH for ratio in ratios) / len(ratios),
        "median ratio": median(ratios),
        "worst ratio": max(ratios),
        "ours ms": 1e3 * ours_s / len(ratios),
        "torchgpipe ms": 1e3 * theirs_s / len(ratios),
    }


def main() -> None:
    parser = bench_parser("partitioner", description=__doc__)
    parser.add_argument("--chains", type=count, default=2000, help="of each row (default 2000)")
    add_output(parser)
    arguments = parser.parse_args()
    require_torchgpipe()
    rows = all_rows(arguments.chains)
    write_table(
        "partitioner",
        rows,
        title="The slowest stage of torchgpipe's cut over that of the exact one",
        notes=[
            "worse: chains on which ours is; an exact cut never is. better %: of the chains; by > 1 %: of the chains, "
            "better by more than 1 %. ms: of one cut, timed, all else follows from the seed."
        ],
        draw=lambda figure: draw(figure, rows),
        folder=arguments.output,
    )


def all_rows(num_chains: int) -> list[Row]:
    def row(name: str, draw: Callable[[Random], Chain]) -> Row:
        random = Random(0)
        return compare(name, (draw(random) for _ in range(num_chains)))

    return [
        row("lognormal(0, 1)", random_chain),
        *(
            row(
                f"blocks ±{percent} %, {num_stages} stages",
                partial(trained_chain, tolerance=percent / 100, num_stages=num_stages),
            )
            for percent, num_stages in product((1, 5), (2, 4, 8))
        ),
    ]


def draw(figure: Figure, rows: list[Row]) -> None:
    axes = figure.subplots()
    for offset, column in ((-0.2, "median ratio"), (0.2, "worst ratio")):
        axes.barh([n + offset for n in range(len(rows))], [float(row[column] or 0) for row in rows], 0.4, label=column)
    axes.set_yticks(range(len(rows)), [str(row["costs"]) for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(left=1)
    axes.legend()


if __name__ == "__main__":
    sys.exit(run_guarded(main))
