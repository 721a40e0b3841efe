"""What the tables of torchgpipe's benchmarks claim: rows, files, the graphs that they train, mistakes in one line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from laws import REPOSITORY
from matplotlib.figure import Figure
from ranks import RankPool

sys.path.insert(0, str(REPOSITORY))

import benchmarks.amoebanet_memory.__main__ as amoebanet_memory
import benchmarks.amoebanet_speed.__main__ as amoebanet_speed
import benchmarks.ddp_vs_pipe.__main__ as ddp_vs_pipe
import benchmarks.memory.__main__ as memory
import benchmarks.overhead.__main__ as overhead
import benchmarks.paper.__main__ as paper
import benchmarks.partitioner.__main__ as partitioner
import benchmarks.pipeline.__main__ as pipeline
import benchmarks.predictor.__main__ as predictor
import benchmarks.resnet101_speed.__main__ as resnet101_speed
import benchmarks.saving.__main__ as saving
import benchmarks.transition.__main__ as transition
from benchmarks.amoebanet_memory.jobs import Held, Job, find_boundaries
from benchmarks.ddp_vs_pipe.fresh_ranks import OutOfMemory
from benchmarks.resnet101_speed.speed import Published, SpeedTable, equal_settings, own_settings, rows_of
from benchmarks.support.graphs import GraphBench, Setting, group_of, time_rounds
from benchmarks.support.measure import save
from benchmarks.support.ranks import is_rank
from benchmarks.support.table import write_table
from pipetransformer.errors import UserError
from pipetransformer.graphs.zoo import zoo_model
from pipetransformer.launch.entry import run_guarded
from pipetransformer.process.world import World

RESNET_SPEED, AMOEBANET_SPEED = (
    partial(table.main, "not started", description="") for table in (resnet101_speed.TABLE, amoebanet_speed.TABLE)
)
SPEED = [resnet101_speed.TABLE, amoebanet_speed.TABLE]
TINY = zoo_model("resnet101")


# ---- tables ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", SPEED, ids=lambda table: table.name)
@pytest.mark.parametrize("scale", ["small", "full"])
def test_rows_are_the_originals_and_micro_batches_are_whole(table: SpeedTable, scale: str) -> None:
    size = table.sizes[scale]
    equal, own = equal_settings(table.settings, size), own_settings(table.settings, size)
    names = [setting.name for setting in table.settings]
    assert [s.name for s in equal] == [s.name for s in own] == list(table.published) == names
    assert len({setting.batch_size for setting in equal}) == 1
    assert all(setting.rows * setting.num_microbatches == setting.batch_size for setting in [*equal, *own])
    for setting, original in zip(own, table.settings):
        assert setting.checkpoint == original.checkpoint
        if size.divisor == 1:
            assert setting.num_microbatches == original.num_microbatches
            assert abs(setting.batch_size - original.batch_size) < original.num_microbatches


@pytest.mark.parametrize("table", SPEED, ids=lambda table: table.name)
def test_published_speedups_are_those_of_the_published_rates(table: SpeedTable) -> None:
    first = table.published[table.settings[0].name]
    for published in table.published.values():
        assert published.samples_per_s / first.samples_per_s == pytest.approx(published.speedup, abs=6e-4)


def test_speedups_are_paired_by_round_and_rows_that_cannot_run_are_kept() -> None:
    settings = [Setting("naive-1", 1, 8), Setting("pipeline-2", 2, 16, 2), Setting("pipeline-8", 8, 16, 2)]
    published = {setting.name: Published(1.0, 1.0) for setting in settings}
    timed = list(zip(settings, [[1.0, 2.0, 4.0], [2.0, 2.0, 4.0], None]))
    first, second, third = rows_of(timed, batch="equal", published=published, world_size=2)
    assert (first["samples/s"], first["slowest"], first["fastest"]) == (4.0, 2.0, 8.0)
    assert second["speed-up"] == 2.0  # of 1, 2 and 2; of the medians it would be 8 / 4 alone
    assert (third["samples/s"], third["note"], third["published speed-up"]) == (None, "needs 8 ranks", 1.0)


@pytest.mark.parametrize("table", SPEED, ids=lambda table: table.name)
def test_rows_are_kept_where_none_of_them_can_run(table: SpeedTable, tmp_path: Path) -> None:
    size = table.sizes["small"]
    settings = [("equal", s) for s in equal_settings(table.settings, size)]
    settings += [("original's", s) for s in own_settings(table.settings, size)]
    table.tell([(*each, None) for each in settings], size, world_size=1, repeats=1, folder=tmp_path)
    rows = json.loads((tmp_path / f"{table.name}.json").read_text())["rows"]
    assert [(row["batch"], row["experiment"]) for row in rows] == [(batch, s.name) for batch, s in settings]
    assert all(
        row["note"] == f"needs {s.num_devices} ranks" for row, (_, s) in zip(rows, settings) if s.num_devices > 1
    )


def test_a_table_is_printed_kept_with_a_row_a_line_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"what": "one", "figure": 1.5, "note": None}, {"what": "two", "figure": None, "note": "needs 8 GPUs"}]
    figures: list[Figure] = []
    path = write_table("name", rows, title="Title ±", notes=["A note."], draw=figures.append, folder=tmp_path / "new")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Title ±" and "A note." in lines
    assert any(line.split() == ["one", "1.5", "-"] for line in lines)
    assert any(line.split() == ["two", "-", "needs", "8", "GPUs"] for line in lines)
    text = path.read_text(encoding="utf-8")
    assert {json.dumps(row) for row in rows} <= {line.strip(" ,") for line in text.splitlines()}
    kept = json.loads(text)
    assert kept["rows"] == rows and "torch" in kept["environment"]
    assert (kept["title"], kept["notes"]) == ("Title ±", ["A note."])
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG") and len(figures) == 1
    assert {path.name for path in path.parent.iterdir()} == {"name.json", "name.png"}


@pytest.mark.parametrize("rows", [[], [{"ratio": [1.0, 2.0]}, {"ratio": [3.0]}]])
def test_results_without_a_table_are_rows_and_their_environment(rows: list[dict[str, object]], tmp_path: Path) -> None:
    kept = json.loads(save("name", rows, folder=tmp_path).read_text())
    assert list(kept) == ["environment", "rows"] and kept["rows"] == rows


@pytest.mark.parametrize("name", list(amoebanet_memory.PUBLISHED))
def test_models_of_the_memory_table_are_those_that_were_published(name: str) -> None:
    model = amoebanet_memory.SIZES["full"].models[name]
    shape, parameters, memory, _ = amoebanet_memory.PUBLISHED[name]
    number = model.num_parameters
    assert str(model) == shape
    assert parameters in (f"{number / 1e6:.0f}M", f"{number / 1e9:.2f}B")
    if name != "pipeline-2":  # see the table's notes
        assert memory == f"{12 * number / 2**30:.2f}GB"


class FakeRanks:
    """Answers as devices that hold 60 bytes of activations a parameter; a large model alone runs out of memory, and one
    of ``uncut`` filters where its units are timed."""

    uncut = 0

    def run(self, function: object, job: Job, *, num_ranks: int) -> list[object]:
        if function is find_boundaries:
            if job.model.filters == self.uncut:
                raise OutOfMemory
            return [tuple(range(1, num_ranks))] * num_ranks
        assert len(job.boundaries) == num_ranks - 1
        if job.model.filters > 64 and num_ranks == 1:
            raise OutOfMemory
        share = job.model.num_parameters // num_ranks
        return [Held(share, 60 * share)] * num_ranks


def test_rows_that_run_out_of_memory_are_kept_and_named(tmp_path: Path) -> None:
    """The limit holds the largest model that one device has the memory for, and no more."""
    size = amoebanet_memory.SIZES["small"]
    number = size.models["pipeline-1"].num_parameters
    limit = 72 * number
    bench = amoebanet_memory.Bench(size, FakeRanks(), most_ranks=4, limit=limit)  # type: ignore[arg-type]
    rows = [bench.row(setting) for setting in amoebanet_memory.settings(size)]
    naive, one, two, four, eight = rows
    assert one["note"] is None and one["largest that fits"] == naive["largest that fits"] == "(1, 64)"
    assert one["largest device MiB"] == 72 * number / 2**20 and one["peak activations MiB"] == 60 * number / 2**20
    assert (eight["note"], eight["parameters"]) == ("needs 8 ranks", size.models["pipeline-8"].num_parameters)
    for row, setting in zip((two, four), (2, 4)):
        beyond = size.models[str(row["experiment"])].num_parameters // setting * 72 > limit
        assert (row["note"] == "out of memory: beyond --device-memory") == beyond
    unlimited = amoebanet_memory.Bench(size, FakeRanks(), most_ranks=8, limit=None)  # type: ignore[arg-type]
    alone = unlimited.row(Setting("pipeline-2", 1, 8, 8))
    assert (alone["note"], alone["peak activations MiB"]) == ("out of memory", None)
    fake = FakeRanks()
    fake.uncut = 88
    uncut = amoebanet_memory.Bench(size, fake, most_ranks=2, limit=limit)  # type: ignore[arg-type]
    row = uncut.row(Setting("pipeline-2", 2, 16, 16))
    assert row["note"] == amoebanet_memory.NOT_CUT, "what times the units is not the row"
    path = write_table("m", rows, title="T", draw=lambda to: amoebanet_memory.draw(to, rows), folder=tmp_path)
    assert "needs 8 ranks" in path.read_text()


# ---- graphs ----------------------------------------------------------------------------------------------------------


def bench_of(world: World) -> GraphBench:
    build = partial(TINY.build, **TINY.small)
    return GraphBench(world, build=build, image_size=TINY.small_input["size"], num_classes=10)


def trained_alike(world: World) -> set[str]:
    """Parameters of this rank's stage that two steps of a pipeline bring where two of the model itself do."""
    bench = bench_of(world)
    naive = bench.step(Setting("naive-1", 1, 4, checkpoint=None))
    pipeline = bench.step(Setting("pipeline-2", 2, 4, 1))
    found: list[dict[str, torch.Tensor]] = []
    for step in (naive, pipeline):
        bench.reset(seed=0)
        for _ in range(2):
            if step is not None:
                step()
        found.append({name: p.detach().clone() for name, p in bench.model.named_parameters()})
        if step is naive:
            torch.distributed.broadcast_object_list(found, src=0)
    bench.reset(seed=0)
    start = dict(bench.model.named_parameters())
    own = {name for name, new in found[1].items() if not torch.equal(new, start[name])}
    # Two steps in float32; a weight of which nothing is left but rounding would differ by all of itself.
    return {
        name for name in own if float((found[1][name] - found[0][name]).abs().max()) < 1e-4 * found[0][name].abs().max()
    }


def test_a_pipeline_of_one_micro_batch_trains_as_the_model_itself(ranks: RankPool) -> None:
    first, second = ranks.run(2, trained_alike)
    names = {name for name, _ in TINY.build(**TINY.small).named_parameters()}
    assert first and second and not first & second and first | second == names


def trained_without_parameters(world: World) -> list[bool]:
    """Of this rank's parameters, whether a step of a pipeline moved them; the second stage has none."""

    def build() -> torch.nn.Module:
        nn = torch.nn
        return nn.Sequential(nn.Conv2d(3, 10, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    bench = GraphBench(world, build=build, image_size=8, num_classes=10)
    bench.boundaries = lambda setting: (1,)  # type: ignore[method-assign]
    step, setting = bench.step(Setting("pipeline-2", 2, 4, 2)), Setting("pipeline-2", 2, 4, 2)
    before = [parameter.clone() for parameter in bench.model.parameters()]
    assert step is not None
    step()
    held = {id(parameter) for group in group_of(bench.pipeline(setting)) for parameter in group["params"]}
    return [not torch.equal(p, old) for p, old in zip(bench.model.parameters(), before) if id(p) in held]


def test_a_stage_without_parameters_trains_along(ranks: RankPool) -> None:
    assert ranks.run(2, trained_without_parameters) == [[True, True], []]


def timed(world: World) -> tuple[list[int], list[list[float]]]:
    bench = bench_of(world)
    settings = [Setting("naive-1", 1, 4, checkpoint=None), Setting("pipeline-2", 2, 4, 2)]
    calls = [0, 0]

    def counted(row: int, setting: Setting) -> None:
        calls[row] += 1
        step = steps[row]
        assert step is not None
        step()

    steps = [bench.step(setting) for setting in settings]
    rows = [step and partial(counted, row, setting) for row, (step, setting) in enumerate(zip(steps, settings))]
    return calls, time_rounds(rows, repeats=2, device=world.device)


def test_every_row_is_timed_in_every_round_on_its_own_ranks(ranks: RankPool) -> None:
    (calls, seconds), (calls_of_1, seconds_of_1), (calls_of_2, _) = ranks.run(3, timed)
    assert [calls, calls_of_1, calls_of_2] == [[3, 3], [0, 3], [0, 0]]
    assert seconds == seconds_of_1 and [len(row) for row in seconds] == [2, 2]
    assert all(second > 0 for row in seconds for second in row)


# ---- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("main", "arguments", "line"),
    [
        (RESNET_SPEED, ["--scale", "big"], "argument --scale: invalid choice: 'big'"),
        (AMOEBANET_SPEED, ["--repeats", "0"], "argument --repeats: 0 is not allowed"),
        (amoebanet_memory.main, ["--device-memory", "8GB"], "argument --device-memory: 8GB is not allowed; give"),
        (RESNET_SPEED, ["--ranks", "9"], "--ranks: 9 is more than the 8 that the longest row has; give at most 8"),
        (AMOEBANET_SPEED, ["--output", "/proc/none"], "--output: /proc/none cannot be written"),
        (amoebanet_memory.main, ["--output", "/proc/none"], "--output: /proc/none cannot be written"),
        (ddp_vs_pipe.main, ["--output", "/proc/none"], "--output: /proc/none cannot be written"),
        (overhead.main, ["--repeats", "0"], "argument --repeats: 0 is not allowed"),
        (predictor.main, ["--repeats", "0"], "argument --repeats: 0 is not allowed"),
        (pipeline.main, ["--repeats", "-1"], "argument --repeats: "),
        (transition.main, ["--cycles", "0"], "argument --cycles: 0 is not allowed"),
        (saving.main, ["--windows", "0"], "argument --windows: 0 is not allowed"),
        (partitioner.main, ["--chains", "0"], "argument --chains: 0 is not allowed"),
        (memory.main, ["--models", "gpt"], "argument --models: invalid choice: 'gpt'"),
        (paper.main, ["more"], "more is not known"),
    ],
)
def test_a_mistake_is_one_line(
    main: Callable[[], None],
    arguments: list[str],
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(sys, "argv", ["script", *arguments])
    monkeypatch.chdir(tmp_path)
    assert run_guarded(main) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("error: ") and line in told


@pytest.mark.parametrize("script", [amoebanet_memory, overhead, partitioner, paper, pipeline, transition])
def test_help_is_the_docstring_as_plain_text(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["script", "--help"])
    with pytest.raises(SystemExit):
        script.main()
    assert script.__doc__ is not None and script.__doc__.strip().replace("``", "") in capsys.readouterr().out


def test_ranks_that_somebody_else_started_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Theirs is the user's own cache, of which a benchmark throws away parts."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "by hand")
    with pytest.raises(UserError, match="torchrun: a benchmark starts its ranks itself"):
        is_rank()
