"""The balance of real parts of GPT-2 and AmoebaNet-D: fastest over slowest part, forward and backward.

    pipetransformer bench balance [--models gpt2,amoebanet_4x512_c10] [--stages 2,4] [--iterations 7] [--scale small]

Each is cut as ``pipetransformer partition`` does, and its parts are run one after the other in this process, round by
round, one thread. Beside the balance stands its bound, the best of any cut of the same units by rounds of their parts
before these: the balance may miss it, or pass it by luck. The best by these rounds themselves, whose noise is then in
both, stands apart; so does FTPipe's own balance of the same model. ``--scale small`` takes shorter texts and smaller
pictures, of the same models.
"""

from __future__ import annotations

import sys
from itertools import product

import torch
from matplotlib.figure import Figure

from benchmarks.ftpipe.originals import ORIGINALS
from benchmarks.support.command_line import add_output, bench_parser
from benchmarks.support.graphs import pick_scale
from benchmarks.support.table import Row, write_table
from pipetransformer.commands.ranks import measure_link
from pipetransformer.graphs.analysis.cut import analyse_model
from pipetransformer.graphs.analysis.ftpipe import imbalance
from pipetransformer.graphs.analysis.report import PartitionReport
from pipetransformer.graphs.zoo import zoo_model
from pipetransformer.graphs.zoo.words import zipf_ids
from pipetransformer.launch.arguments import count
from pipetransformer.launch.entry import run_guarded
from pipetransformer.pipe.planner.costs import Link

# As FTPipe ran them: micro-batch and levels of the module tree.
SETTINGS = {"gpt2": (1, 3), "amoebanet_4x512_c10": (4, None)}
SMALL = {"gpt2": 256, "amoebanet_4x512_c10": 96}
# Reports of FTPipe, with recomputation, by model and number of parts.
FTPIPE = {("gpt2", 4): "gpt2-4p", ("gpt2", 2): "gpt2-2p", ("amoebanet_4x512_c10", 4): "amoebanet-4p"}


def main() -> None:
    parser = bench_parser("balance", description=__doc__)
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(SETTINGS), metavar="NAME,...")
    parser.add_argument("--stages", type=lambda text: [count(n) for n in text.split(",")], default=[2, 4])
    parser.add_argument("--iterations", type=count, default=7, help="timed rounds over all parts (default 7)")
    parser.add_argument("--scale", choices=("small", "full"), help="sizes of inputs (default: by CUDA)")
    add_output(parser)
    arguments = parser.parse_args()
    for name in arguments.models:
        zoo_model(name)
    torch.set_num_threads(1)
    link, rows = measure_link(), list[Row]()
    for name, num_stages in product(arguments.models, arguments.stages):
        size = SMALL.get(name) if pick_scale(arguments.scale) == "small" else None
        report = analysed(name, num_stages, link=link, size=size, iterations=arguments.iterations)
        rows.append(row_of(report, name))
        print(f"{name}, {num_stages} parts: {rows[-1]['balance']:.4f}, bound {rows[-1]['bound']:.4f}", flush=True)
    write_table(
        "balance",
        rows,
        title="Balance of real parts, fastest over slowest, forward and backward",
        notes=[
            "balance: of the medians over the rounds; spread: least and most of single rounds. bound: the best of any "
            "cut of the same units by rounds before these, from which the cut was made; of bound: balance over it. by "
            "these rounds: the same by the rounds of the balance. theoretical / real: a part's units timed one by one, "
            "over the part.",
            "Backwards include recomputation, as FTPipe's do; its balance is of other devices (GPT-2: GTX 1070).",
        ],
        draw=lambda figure: draw(figure, rows),
        folder=arguments.output,
    )


def analysed(name: str, num_stages: int, *, link: Link, size: int | None, iterations: int) -> PartitionReport:
    model, (batch_size, depth) = zoo_model(name), SETTINGS.get(name, (1, None))
    if model.kind == "tokens":
        example = zipf_ids(batch_size, size or model.size, vocabulary_size=model.vocabulary_size)
    else:
        example = model.example(batch_size=batch_size, seed=0, size=size)
    report, _ = analyse_model(
        model,
        example=example,
        num_stages=num_stages,
        iterations=iterations,
        depth=depth,
        recompute=True,
        memory_limit=None,
        num_microbatches=2 * num_stages,
        link=link,
        title=name,
        source="",
        profiles=None,
    )
    return report


def row_of(report: PartitionReport, name: str) -> Row:
    both = report.real.both
    rounds = [
        imbalance([f + b for f, b in times])
        for times in zip(*(tuple(zip(f.values, b.values)) for f, b in zip(report.forward, report.backward)))
    ]
    original = FTPIPE.get((name, len(both)))
    theory = [t / r for t, r in zip(report.sequential.both, both)]
    return {
        "model": name,
        "parts": len(both),
        "units": len(report.units),
        "ms by part": " ".join(f"{time:.0f}" for time in both),
        "balance": imbalance(both),
        "spread": f"{min(rounds):.3f} .. {max(rounds):.3f}",
        "bound": report.bound,
        "of bound": imbalance(both) / report.bound,
        "by these rounds": report.bound_of_rounds,
        "FTPipe": imbalance(ORIGINALS[original][0].real.both) if original else None,
        "theoretical / real": " ".join(f"{ratio:.2f}" for ratio in theory),
    }


def draw(figure: Figure, rows: list[Row]) -> None:
    axes = figure.subplots()
    names = [f"{row['model']}, {row['parts']} parts" for row in rows]
    for offset, column in ((-0.2, "FTPipe"), (0.0, "balance"), (0.2, "bound")):
        axes.barh([n + offset for n in range(len(rows))], [float(row[column] or 0) for row in rows], 0.2, label=column)
    axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.05), ncols=3, frameon=False)


if __name__ == "__main__":
    sys.exit(run_guarded(main))
