"""The two speed tables: rows at an equal batch and at the original's own batches, timed round by round in one run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch
from matplotlib.figure import Figure
from torch import nn

from benchmarks.resnet101_speed.original import Original, predict
from benchmarks.resnet101_speed.original_table import tell_predictions
from benchmarks.support.command_line import add_output, bench_parser, refuse_without_effect
from benchmarks.support.graphs import (
    GraphBench,
    Setting,
    add_scale,
    needs,
    num_ranks,
    pick_scale,
    sharing_note,
    time_rounds,
)
from benchmarks.support.ranks import as_ranks
from benchmarks.support.table import Row, write_table
from pipetransformer.errors import UserError
from pipetransformer.launch.arguments import count
from pipetransformer.process.world import World

__all__ = ["Published", "Size", "SpeedTable", "equal_settings", "own_settings"]

_EQUAL, _OWN = "equal", "original's"


@dataclass(frozen=True, slots=True)
class Published:
    """The original's figures of a row."""

    samples_per_s: float
    speedup: float


@dataclass(frozen=True, slots=True)
class Size:
    """The sizes that ``--scale`` picks.

    Attributes:
        model: the words that name it.
        batch_size, num_microbatches: of the rows at an equal batch.
        divisor: what the original's batches and numbers of micro-batches are divided by.
    """

    model: str
    build: Callable[[], nn.Module]
    image_size: int
    batch_size: int
    num_microbatches: int
    divisor: int


@dataclass(frozen=True, slots=True)
class SpeedTable:
    """A table of the original's.

    Attributes:
        name: of the benchmark, as in ``pipetransformer bench NAME``.
        rows: the original's. The first is what speed-ups are against.
        original: how the original cuts its model.
        notes: what is this table's own to know.
        original_notes: likewise, of the prediction at the original's size.
    """

    name: str
    title: str
    sizes: Mapping[str, Size]
    rows: Mapping[Setting, Published]
    original: Original
    notes: Sequence[str]
    original_notes: Sequence[str]
    num_classes: int = 10

    @property
    def settings(self) -> list[Setting]:
        return list(self.rows)

    @property
    def published(self) -> dict[str, Published]:
        """By name of the row."""
        return {setting.name: published for setting, published in self.rows.items()}

    def main(self, script: str, *, description: str) -> None:
        """Starts ``script`` again as ranks, where a rank measures; predicts at once for ``--scale original``."""
        parser = bench_parser(self.name, description=description)
        add_scale(parser, predicted="original")
        parser.add_argument("--repeats", type=count, default=7, help="timed rounds over all rows (default 7)")
        add_output(parser)
        arguments = parser.parse_args()
        if arguments.scale == "original":
            refuse_without_effect(parser, arguments, "repeats", "ranks", where="--scale original")
            self.predict(folder=arguments.output)
            return
        as_ranks(
            script,
            partial(
                self._measure, scale=pick_scale(arguments.scale), repeats=arguments.repeats, folder=arguments.output
            ),
            num_ranks=num_ranks(arguments.ranks),
        )

    def predict(self, *, folder: Path) -> None:
        """Writes the table that is predicted at the original's size."""
        published = {name: row.samples_per_s for name, row in self.published.items()}
        full = self.sizes["full"]
        found = predict(self.settings, self.original, published=published, build=full.build, image_size=full.image_size)
        notes = [f"{full.model}, {full.image_size} x {full.image_size} pixels.", *self.original_notes]
        tell_predictions(
            self.name, found, self.settings, published=published, title=self.title, notes=notes, folder=folder
        )

    def _measure(self, world: World, *, scale: str, repeats: int, folder: Path) -> None:
        size = self.sizes[scale]
        bench = GraphBench(world, build=size.build, image_size=size.image_size, num_classes=self.num_classes)
        settings = [
            *((_EQUAL, setting) for setting in equal_settings(self.settings, size)),
            *((_OWN, setting) for setting in own_settings(self.settings, size)),
        ]
        able = [setting for _, setting in settings if needs(setting, world_size=world.size) is None]
        try:
            seconds = time_rounds([bench.step(setting) for setting in able], repeats=repeats, device=world.device)
        except torch.OutOfMemoryError as error:
            raise UserError(f"--scale: {scale} does not fit this device's memory ({error}); give small") from error
        if world.rank == 0:
            taken = {id(setting): rounds for setting, rounds in zip(able, seconds)}
            timed = [(block, setting, taken.get(id(setting))) for block, setting in settings]
            self.tell(timed, size, world_size=world.size, repeats=repeats, folder=folder)

    def tell(
        self,
        timed: Sequence[tuple[str, Setting, list[float] | None]],
        size: Size,
        *,
        world_size: int,
        repeats: int,
        folder: Path,
    ) -> None:
        """Writes the table of all rows: (batch, setting, seconds of every round or None where it cannot run)."""
        rows = [
            row
            for batch in (_EQUAL, _OWN)
            for row in rows_of(
                [(setting, seconds) for block, setting, seconds in timed if block == batch],
                batch=batch,
                published=self.published,
                world_size=world_size,
            )
        ]
        most = max((setting.num_devices for _, setting, seconds in timed if seconds), default=1)
        notes = [f"{size.model}, {size.image_size} x {size.image_size} random pixels; timed rounds: {repeats}."]
        notes += [*self.notes, *_notes(size), *filter(None, [sharing_note(most)])]
        write_table(self.name, rows, title=self.title, notes=notes, draw=lambda to: _draw(to, rows), folder=folder)


def equal_settings(settings: Sequence[Setting], size: Size) -> list[Setting]:
    """The original's rows at one batch; those that it pipelines all cut it into the same micro-batches."""
    return [
        Setting(setting.name, setting.num_devices, size.batch_size, checkpoint=setting.checkpoint)
        if _is_naive(setting)
        else Setting(setting.name, setting.num_devices, size.batch_size, size.num_microbatches)
        for setting in settings
    ]


def own_settings(settings: Sequence[Setting], size: Size) -> list[Setting]:
    """The original's rows with batch and number of micro-batches divided; rows of a micro-batch stay, to a whole
    number."""
    scaled = []
    for setting in settings:
        if setting.num_microbatches == 1:
            batch, number = max(1, setting.batch_size // size.divisor), 1
        else:
            number = max(2, setting.num_microbatches // size.divisor)
            batch = number * round(setting.batch_size / setting.num_microbatches)
        scaled.append(Setting(setting.name, setting.num_devices, batch, number, setting.checkpoint))
    return scaled


def _is_naive(setting: Setting) -> bool:
    return setting.checkpoint in (None, "never")


def rows_of(
    timed: Sequence[tuple[Setting, list[float] | None]],
    *,
    batch: str,
    published: Mapping[str, Published],
    world_size: int,
) -> list[Row]:
    """The lines of one block; speed-ups are medians over rounds of each against the block's first row in that round."""
    rows: list[Row] = []
    first_setting, first_seconds = timed[0]
    for setting, seconds in timed:
        row: dict[str, str | int | float | None] = {
            "batch": batch,
            "experiment": setting.name,
            "devices": setting.num_devices,
            "rows": setting.batch_size,
            "micro-batches": setting.num_microbatches,
            "checkpoint": setting.checkpoint or "never",
            **dict.fromkeys(("samples/s", "slowest", "fastest", "speed-up"), None),
            "published samples/s": published[setting.name].samples_per_s,
            "published speed-up": published[setting.name].speedup,
            "note": needs(setting, world_size=world_size),
        }
        if seconds:
            rates = [setting.batch_size / second for second in seconds]
            row |= {"samples/s": median(rates), "slowest": min(rates), "fastest": max(rates)}
            if first_seconds:
                first = [first_setting.batch_size / second for second in first_seconds]
                row["speed-up"] = median(mine / other for mine, other in zip(rates, first))
        rows.append(row)
    return rows


def _notes(size: Size) -> list[str]:
    divided = f" divided by {size.divisor}" if size.divisor > 1 else ""
    return [
        "Equal batch: all rows train the same batch, and all pipelines cut it into the same number of micro-batches.",
        f"Original's: each row its own batch and micro-batches{divided}, to whole rows of a micro-batch. Published "
        "figures are of 8 Tesla P40 at these, undivided.",
        "A step is forward, backward and SGD. Pipelines: GPipe, cut by the exact partitioner from costs that rank 0 "
        "measured at the start and corrected by running the parts; except_last keeps the activations of the last "
        "micro-batch alone, as the original.",
        "samples/s: median, slowest and fastest round; speed-up: median of the rounds' ratios to the block's first "
        "row. One thread a rank.",
    ]


def _draw(figure: Figure, rows: Sequence[Row]) -> None:
    """Speed-ups as bars: ours at both batches, the published."""
    names = list(dict.fromkeys(str(row["experiment"]) for row in rows))
    axes = figure.subplots()
    columns = [(f"ours, {batch} batch" + "es" * (batch == _OWN), batch, "speed-up") for batch in (_EQUAL, _OWN)]
    columns.append(("published (P40)", _OWN, "published speed-up"))
    for number, (label, batch, key) in enumerate(columns):
        values = [row[key] for row in rows if row["batch"] == batch]
        heights = [float(value) if isinstance(value, (int, float)) else 0.0 for value in values]
        bars = axes.bar([at + 0.27 * (number - 1) for at in range(len(names))], heights, width=0.25, label=label)
        texts = [f"{height:.2f}" if value is not None else "not run" for height, value in zip(heights, values)]
        axes.bar_label(bars, texts, fontsize=8, padding=2)
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set_xticks(range(len(names)), names)
    axes.set_ylabel(f"speed-up over {names[0]}")
    axes.legend()
