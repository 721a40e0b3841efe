"""FTPipe's partition reports, by its own commands at its own sizes, beside what it printed.

    pipetransformer bench ftpipe [--reports amoebanet-4p,gpt2-2p] [--iterations 10]

AmoebaNet-D (4 x 512, 224 pixels, batch 4) in 4 parts, with and without recomputation, and GPT-2 small (1,024 tokens,
batch 1) in 4 and in 2 parts. Each leaves ``ftpipe-REPORT``: the text as ``pipetransformer partition`` prints it, the
picture, and as JSON the figures under FTPipe's labels beside its own. A round takes half a minute on a CPU core.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import pvariance
from tempfile import TemporaryDirectory
from unittest.mock import patch

from benchmarks.ftpipe.originals import COMMANDS, ORIGINALS, Original
from benchmarks.support.command_line import add_output, bench_parser
from benchmarks.support.measure import save
from benchmarks.support.table import Row, text_of
from pipetransformer.commands import partition
from pipetransformer.commands.pictures import draw_partition
from pipetransformer.errors import UserError
from pipetransformer.graphs.analysis.ftpipe import Pairs, PartTimes, imbalance, latencies, topology_imbalance
from pipetransformer.graphs.analysis.printout import mean_deviation, of_rounds, printout, volumes
from pipetransformer.graphs.analysis.report import PartitionReport
from pipetransformer.launch.arguments import Parser, count
from pipetransformer.launch.entry import run_guarded


def main() -> None:
    parser = bench_parser("ftpipe", description=__doc__)
    parser.add_argument(
        "--reports", type=_reports, default=list(COMMANDS), metavar="NAME,...", help=f"of {', '.join(COMMANDS)}"
    )
    parser.add_argument("--iterations", type=count, help="timed rounds (default: the original's, 50 and 100)")
    add_output(parser)
    arguments = parser.parse_args()
    folder = arguments.output.absolute()
    with TemporaryDirectory() as cache, patch.dict(os.environ, PIPETRANSFORMER_CACHE=cache):  # no unit cost of before
        for name in arguments.reports:
            call = COMMANDS[name].split()
            if arguments.iterations is not None:
                call = [f"--n_iter={arguments.iterations}" if part.startswith("--n_iter") else part for part in call]
            write(name, call, folder=folder)


def _reports(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in COMMANDS]:
        raise UserError(f"--reports: {unknown[0]} is not known; give some of {', '.join(COMMANDS)}")
    return names


def write(name: str, call: Sequence[str], *, folder: Path) -> None:
    """Runs a command of ``pipetransformer partition`` and writes its report beside the original's."""
    parser = Parser(prog="pipetransformer partition")
    partition.add_arguments(parser)
    command = parser.parse_args(call)
    command.call = ["partition", *call]
    model = partition.model_of(command)
    report, graph = partition.analysed(model, command)
    rows = rows_of(report, ORIGINALS[name])
    print(text_of(list(rows[0]), rows, title=report.title, notes=[]))
    kept = save(f"ftpipe-{name}", rows, title=report.title, notes=[report.source], folder=folder)
    kept.with_suffix(".txt").write_text(f"{printout(report, labels=partition.labels_of(model))}\n")
    draw_partition(graph, report, path=kept.with_suffix(".png"))
    print(f"written to {kept}, .txt and .png")


def rows_of(report: PartitionReport, originals: Sequence[Original]) -> list[Row]:
    """A figure a row, parts in their order, milliseconds and MB: of the originals, whose parts are chains, and ours.

    Real times of ours are medians of the rounds.
    """
    ours = Original(
        device="here",
        num_edges=len(report.edges),
        sequential=report.sequential,
        parallel=report.parallel if originals[0].parallel else None,
        real=report.real,
        variance=of_rounds(report, pvariance),
        deviation=of_rounds(report, mean_deviation),
        volumes=tuple((given / 1e6, receive, out / 1e6, send) for (given, receive), (out, send) in volumes(report)),
    )
    columns = [
        *(dict(_figures(each, connected=set(pairwise(range(len(each.volumes)))))) for each in originals),
        dict(_figures(ours, connected=report.connected)),
    ]
    names = [f"FTPipe, {original.device}" for original in originals]
    return [
        {"figure": figure, **{name: column.get(figure) for name, column in zip([*names, "here"], columns)}}
        for figure in columns[0]
    ]


def _figures(of: Original, *, connected: Pairs) -> Iterable[tuple[str, str | float]]:
    """(label, figure) in the order of the printout."""
    theoretical = {"theoretical": of.sequential}
    if of.parallel is not None:
        theoretical = {"theoretical sequential": of.sequential, "theoretical parallel": of.parallel}
    every = {**theoretical, "real": of.real}
    yield "number of cutting edges", of.num_edges
    for name, times in (*every.items(), ("variance of real", of.variance), ("avg diviation of real", of.deviation)):
        if times is not None:
            yield from _both(name, times)
    for title, figure in (
        ("imbalance", imbalance),
        ("topology aware imbalance", partial(topology_imbalance, connected=connected)),
    ):
        for name, times in every.items():
            yield f"{name} {title} forward", figure(times.forward)
            yield f"{name} {title} backward", figure(times.backward)
    for place, label in enumerate(("input size MB", "recieve_time ms", "out MB", "send time ms")):
        yield label, _by_part(exchange[place] for exchange in of.volumes)
    if of.parallel is not None:  # the script for GPT-2 prints no latencies
        return
    for name, times in (("theoretical", of.sequential), ("real", of.real)):
        yield from _both(f"ideal {name} latency", latencies(times, connected=connected))


def _both(name: str, times: PartTimes) -> Iterable[tuple[str, str]]:
    yield f"{name} forward ms", _by_part(times.forward)
    yield f"{name} backward ms", _by_part(times.backward)


def _by_part(values: Iterable[float]) -> str:
    return " | ".join(f"{value:.6g}" for value in values)


if __name__ == "__main__":
    sys.exit(run_guarded(main))
