"""The exact partitioner beside torchgpipe's block partition, on the same random costs.

    pip install -e ".[bench]"
    pipetransformer bench partitioner [--chains 2000]

Both cut a chain into contiguous stages, communication left out, which torchgpipe does not know. A ratio is the slowest
stage of torchgpipe's cut over that of ours: 1 is a draw, and it is never below.
"""

from __future__ import annotations

import json
import sys
from random import Random
from statistics import median
from time import perf_counter

from benchmarks.support.command_line import bench_parser
from benchmarks.support.measure import save
from benchmarks.support.torchgpipe import require_torchgpipe
from pipetransformer.launch.arguments import count
from pipetransformer.launch.entry import run_guarded
from pipetransformer.pipe.planner.partition import partition, stage_costs


def compare(num_chains: int, *, seed: int = 0) -> dict[str, object]:
    from torchgpipe.balance import blockpartition  # not installed with the project

    random = Random(seed)
    ratios, ours_s, theirs_s = [], 0.0, 0.0
    for _ in range(num_chains):
        num_units = random.randint(2, 64)
        num_stages = random.randint(1, min(16, num_units))
        costs = [round(10**6 * random.lognormvariate(0.0, 1.0)) for _ in range(num_units)]
        start = perf_counter()
        cut = partition(costs, num_stages=num_stages)
        middle = perf_counter()
        blocks = blockpartition.solve(costs, partitions=num_stages)
        ours_s, theirs_s = ours_s + middle - start, theirs_s + perf_counter() - middle
        assert cut is not None
        ratios.append(max(sum(block) for block in blocks) / max(stage_costs(costs, cut)))
    return {
        "chains": num_chains,
        "never_worse": min(ratios) >= 1.0,
        "better_share": sum(ratio > 1.0 for ratio in ratios) / num_chains,
        "median_ratio": median(ratios),
        "worst_ratio": max(ratios),
        "ms_per_chain": {"ours": 1e3 * ours_s / num_chains, "torchgpipe": 1e3 * theirs_s / num_chains},
    }


def main() -> None:
    parser = bench_parser("partitioner", description=__doc__)
    parser.add_argument("--chains", type=count, default=2000, help="random chains (default 2000)")
    arguments = parser.parse_args()
    require_torchgpipe()
    result = compare(arguments.chains)
    print(json.dumps(result, indent=1))
    print(f"saved {save('partitioner', [result])}")


if __name__ == "__main__":
    sys.exit(run_guarded(main))
