"""Predict a whole elastic run on a cluster that is not there, from a YAML file that describes both."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.table import Table

from pipetransformer.commands.tables import make_console, make_table
from pipetransformer.errors import UserError, check_folder, writing
from pipetransformer.pipe.planner.search import simulate_plan
from pipetransformer.simulation.analytic import costs_of
from pipetransformer.simulation.run import Segment, run_simulation
from pipetransformer.simulation.schema import load_simulation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("simulation", metavar="FILE", help="YAML file; its keys are in docs/simulation.md")
    parser.add_argument("overrides", metavar="key=value", nargs="*", default=[], help="e.g. cluster.nodes=128")
    parser.add_argument("--picture", metavar="PNG", type=Path, help="where to draw the run and its first step")


def run(arguments: argparse.Namespace) -> None:
    picture = arguments.picture
    if picture is not None:
        if picture.suffix != ".png":
            raise UserError(f"--picture: {picture} is no PNG file; give a name that ends with .png")
        check_folder(picture.parent, key="--picture")
    config = load_simulation(arguments.simulation, arguments.overrides)
    segments = run_simulation(config)
    console = make_console()
    console.print(_table(segments))
    total, steps = sum(s.seconds for s in segments), sum(s.num_steps for s in segments)
    still = run_simulation(config.without_freezing())
    baseline = sum(s.seconds for s in still)
    console.print(
        f"{config.world_size:,} ranks, {config.model.blocks} blocks, {steps:,} steps: {_duration(total)}; "
        f"without freezing {_duration(baseline)}, {baseline / total:.2f} times as long"
    )
    if picture is not None:
        from pipetransformer.commands.pictures import draw_run  # imports matplotlib: only where something is drawn

        timeline = simulate_plan(
            segments[0].prediction.plan, costs=costs_of(config), global_batch_size=config.train.batch_size
        )
        with writing(picture, key="--picture"):
            draw_run(segments, timeline, path=picture)
        console.print(f"drawn in {picture}")


def _table(segments: tuple[Segment, ...]) -> Table:
    titles = ("epochs", "frozen", "pp x dp", "schedule", "M", "cache", "step ms", "idle %", "GB", "enter s", "all s")
    return make_table(titles, map(_row, segments), left=["schedule"])


def _row(segment: Segment) -> tuple[str, ...]:
    prediction, plan = segment.prediction, segment.prediction.plan
    last = segment.first_epoch + segment.num_epochs
    return (
        f"{segment.first_epoch + 1}-{last}" if segment.num_epochs > 1 else str(last),
        str(plan.frozen),
        f"{plan.pp} x {plan.dp}",
        plan.schedule if plan.pp > 1 else "-",
        str(plan.num_microbatches),
        "-" if plan.cached is None else str(plan.cached),
        f"{prediction.step_seconds * 1e3:,.1f}",
        f"{100 * prediction.bubble:.0f}",
        f"{max(prediction.memory_bytes) / 1e9:.1f}",
        f"{segment.transition_seconds + segment.advance_seconds:.1f}",
        f"{segment.seconds:,.0f}",
    )


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
