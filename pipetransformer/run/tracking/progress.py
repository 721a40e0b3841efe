"""The live view of a run: a bar on a terminal, plain lines elsewhere. Where no one reads it any more, as behind
``| head``, or its disk is full, it goes nowhere, and the run goes on."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

from rich import progress as rich_progress
from rich.console import Console, RenderableType
from rich.table import Column
from rich.text import Text

from pipetransformer.config.secrets import masked

_SECONDS_BETWEEN_DRAWS = 0.1
_SECONDS_BETWEEN_LINES = 10.0
_MOST_SHOWN = 12  # blocks


def say(text: str) -> None:
    """Prints a line on standard output at once."""
    try:
        print(text, flush=True)
    except OSError:
        _send_nowhere(sys.stdout)


def _send_nowhere(file: TextIO) -> None:
    """Gives the file's descriptor to the null device."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: it has none
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, file.fileno())
        os.close(null)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """In the place of rich's own, which ends the process."""
        _send_nowhere(self.file)  # type: ignore[arg-type]


class Progress:
    """Shows the steps of a run as a bar, and facts as lines.

    The bar is on standard output if that is a terminal, else on standard error if that is one. Without a terminal,
    lines replace the bar. Facts always go to standard output, so that they are in a user's file or pipe.

    Drawing takes about 0.5 ms. ``update`` does it itself, without a thread, at most ten times a second.

    Args:
        out: standard output, if not given.
        err: standard error, if not given.
        quiet: whether nothing is shown at all.
    """

    def __init__(self, *, out: TextIO | None = None, err: TextIO | None = None, quiet: bool = False) -> None:
        out = out or sys.stdout
        err = err or sys.stderr
        self._out = _Console(file=out, highlight=False, markup=False, emoji=False, quiet=quiet)
        self._bar = None if quiet else _new_bar(out=out, err=err, facts=self._out)
        self._task: rich_progress.TaskID | None = None
        self._figures: dict[str, Any] = {}
        self._next_draw = 0.0 if self._bar else time.monotonic() + _SECONDS_BETWEEN_LINES

    def update(self, step: int, **figures: Any) -> None:
        """Shows that ``step`` steps are done.

        Args:
            figures: ``total_steps``, ``epoch`` (counted from 1), ``num_epochs``, ``loss``, ``lr``, ``metric`` (its name
                and value), ``samples_per_second``, ``frozen``, ``num_blocks``, ``pp``, ``dp``, ``microbatches``,
                ``cache_hit_rate`` (0 to 1) and ``time_left`` (of ``step``, gives a ``Left``, or None). One that is
                None, or not given, keeps its last value. ``loss`` may be a tensor: it is read only when the bar is
                drawn, as ``time_left`` is called only then.
        """
        self._figures |= {name: value for name, value in figures.items() if value is not None}
        total_steps = self._figures["total_steps"]
        now = time.monotonic()
        if now < self._next_draw and step != total_steps:
            return
        if self._bar is None:
            self._next_draw = now + _SECONDS_BETWEEN_LINES
            told = (*_pieces(self._figures, wide=True), *_clock(self._figures, step))
            self.line(f"step {step}/{total_steps}: {', '.join(told)}")
            return
        self._next_draw = now + _SECONDS_BETWEEN_DRAWS
        if self._task is None:
            self._bar.start()
            self._task = self._bar.add_task("", total=total_steps, completed=step, clock="")
        self._bar.status = _fitting(_pieces(self._figures, wide=False), width=self._bar.console.width)
        with _bearing(self._bar.console):
            clock = ", ".join(_clock(self._figures, step))
            self._bar.update(self._task, completed=step, total=total_steps, clock=clock)
            self._bar.refresh()

    def line(self, text: str) -> None:
        """Prints a fact, above the bar."""
        self.show(Text(masked(text)), soft_wrap=True)

    def show(self, renderable: RenderableType, *, soft_wrap: bool = False) -> None:
        """Prints a renderable of rich, such as a table, above the bar."""
        with _bearing(self._out):
            self._out.print(renderable, soft_wrap=soft_wrap)
            self._out.file.flush()

    def close(self) -> None:
        """Ends the bar, which stays on the screen, and shows the terminal's cursor again. May be called twice."""
        if self._bar is not None:
            with _bearing(self._bar.console):
                self._bar.stop()


@contextlib.contextmanager
def _bearing(console: Console) -> Iterator[None]:
    try:
        yield
    except OSError:
        _send_nowhere(console.file)  # type: ignore[arg-type]


class _Bar(rich_progress.Progress):
    """The bar with steps and times, and a line of figures below it.

    Attributes:
        status: that line.
    """

    status = ""

    def get_renderables(self) -> Iterator[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield Text(self.status, no_wrap=True, overflow="ellipsis")


def _new_bar(*, out: TextIO, err: TextIO, facts: Console) -> _Bar | None:
    # Not Console.is_terminal: FORCE_COLOR makes that true for a file.
    if out.isatty():
        console = facts
    elif err.isatty():
        console = _Console(file=err)
    else:
        return None
    if console.is_dumb_terminal:
        return None
    return _Bar(
        rich_progress.TextColumn(
            "step {task.completed:.0f}/{task.total:.0f}",
            style="none",
            markup=False,
            table_column=Column(no_wrap=True),
        ),
        rich_progress.BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=5)),
        rich_progress.TextColumn("{task.fields[clock]}", style="none", markup=False, table_column=Column(no_wrap=True)),
        console=console,
        auto_refresh=False,
        expand=True,
        redirect_stdout=console is facts,
    )


def _clock(values: Mapping[str, Any], step: int) -> Iterator[str]:
    """Time gone and time left, in words."""
    left = values["time_left"](step) if "time_left" in values else None
    if left is None or step >= values["total_steps"]:
        return
    yield f"{_time(left.elapsed)} gone"
    least, most = _time(left.least), _time(left.most)
    yield f"{least} left" if least == most else f"{least} to {most} left"


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _blocks(frozen: int, num_blocks: int | None) -> str:
    """How many of the blocks are frozen, as a bar where there are few, and in words."""
    if num_blocks is None:
        return f"{frozen} frozen"
    told = f"{frozen} of {num_blocks} frozen"
    return told if num_blocks > _MOST_SHOWN else "▓" * frozen + "░" * (num_blocks - frozen) + f" {told}"


def _pieces(values: Mapping[str, Any], *, wide: bool) -> list[str]:
    """The figures in words, those first that matter most.

    Args:
        wide: whether there is room for all, in their usual order.
    """
    found = dict[str, str]()
    if "epoch" in values:
        found["epoch"] = f"epoch {values['epoch']}/{values['num_epochs']}"
    if "loss" in values:
        found["loss"] = f"loss {float(values['loss']):.3f}"
    if "metric" in values:
        name, value = values["metric"]
        found["metric"] = f"{name} {value:.3f}"
    if "frozen" in values:
        found["frozen"] = _blocks(values["frozen"], values.get("num_blocks"))
    if "samples_per_second" in values:
        found["speed"] = f"{values['samples_per_second']:,.0f} samples/s"
    if "pp" in values:
        found["pp"] = f"pp {values['pp']} x dp {values['dp']}"
    if "cache_hit_rate" in values:
        found["cache"] = f"cache {100 * values['cache_hit_rate']:.0f} %"
    if "microbatches" in values:
        found["M"] = f"M {values['microbatches']}"
    if "lr" in values:
        found["lr"] = f"lr {values['lr']:.1e}"
    usual = ("epoch", "loss", "metric", "lr", "speed", "frozen", "pp", "M", "cache")
    return [found[name] for name in usual if name in found] if wide else list(found.values())


def _fitting(pieces: Sequence[str], *, width: int) -> str:
    """As many of the pieces, from the first on, as a line of ``width`` has room for."""
    line = ""
    for piece in pieces:
        longer = f"{line}  {piece}" if line else piece
        if len(longer) > width:
            break
        line = longer
    return line
