"""A whole run, simulated: what it adds up, what it decides, how fast it answers, and what it refuses."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from pipetransformer.commands import main
from pipetransformer.commands.pictures import draw_timeline
from pipetransformer.errors import UserError
from pipetransformer.pipe.measure.profile_file import Profile, file_name, load_profile, save_profile
from pipetransformer.pipe.planner.constraints import Constraints
from pipetransformer.pipe.planner.costs import Link
from pipetransformer.pipe.planner.search import best_plans
from pipetransformer.pipe.planner.step_simulator import StageCosts, simulate
from pipetransformer.pipe.planner.transition_cost import transition_bytes, transition_seconds
from pipetransformer.plan import ParallelPlan
from pipetransformer.simulation.analytic import costs_of
from pipetransformer.simulation.run import run_simulation
from pipetransformer.simulation.schema import load_simulation, simulation_page

REPOSITORY = Path(__file__).resolve().parent.parent
SIMULATIONS = sorted((REPOSITORY / "config").glob("simulation_*.yaml"))
LARGE = REPOSITORY / "config" / "simulation_1024.yaml"
SMALL = """
model: {blocks: 4, width: 8, tokens: 10, heads: 2, stem_parameters: 100, head_parameters: 10}
train: {samples: 640, epochs: 4, batch_size: 64}
freeze: {frozen: [0, 0, 2, 4]}
cluster:
  nodes: 1
  devices_per_node: 4
  operations_per_second: 1.0e9
  memory_bytes_per_second: 100 GB
  inside: {bytes_per_second: 1 GB, latency_us: 1}
  host: {bytes_per_second: 1 GB}
  transition_seconds: 0.25
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    (tmp_path / "small.yaml").write_text(SMALL)
    return tmp_path / "small.yaml"


# ---- costs that are counted ------------------------------------------------------------------------------------------


ONE_BLOCK = ["model.blocks=1", "model.stem_parameters=0", "model.head_parameters=0", "freeze.frozen=[0,0,0,0]"]


def test_operations_of_a_block_are_those_of_its_products(small: Path) -> None:
    """Counted one by one: queries, keys, values, output; scores and their sum; two products of the MLP."""
    d, t = 8, 10
    products = [(t, d, d)] * 4 + [(t, d, t), (t, t, d)] + [(t, d, 4 * d), (t, 4 * d, d)]
    operations = sum(2 * n * k * m for n, k, m in products)
    costs = costs_of(load_simulation(small, [*ONE_BLOCK, "train.batch_size=6", "cluster.devices_per_node=2"]))
    assert costs.by_rows[3].forward_ns == (0, 3 * operations, 0)
    assert costs.by_rows[3].backward_ns == (0, 6 * operations, 0)


@pytest.mark.parametrize("replicas", [2, 4, 8])
def test_a_ring_moves_twice_the_rest_of_the_bytes(small: Path, replicas: int) -> None:
    link = ["cluster.inside.bytes_per_second=500000000", "cluster.inside.latency_us=0.005", "cluster.overlap=0.0"]
    costs = costs_of(load_simulation(small, [*ONE_BLOCK, "cluster.devices_per_node=8", *link]))
    expected = 5 + 2.0 * 1000 * 2 * (replicas - 1) / replicas
    assert costs.reduction_ns(1000, num_replicas=replicas) == pytest.approx(expected, abs=1)
    shared = replace(costs, between=Link(5, 2.0))  # 8 / replicas stages go over a node's card at once
    expected = 5 + 8 / replicas * (expected - 5)
    assert shared.reduction_ns(1000, num_replicas=replicas) == pytest.approx(expected, abs=1)


def test_fewer_busy_ranks_are_faster_in_proportion_where_cores_are_shared() -> None:
    costs = replace(costs_of(load_simulation(LARGE)), num_ranks=4, contention=2.0)
    assert costs.busy_factors(4) == pytest.approx((0.5, 2 / 3, 5 / 6, 1.0))
    assert costs.busy_factors(2) == pytest.approx((2 / 3, 1.0))  # one of each of two pipelines
    assert replace(costs, contention=1.0).busy_factors(4) is None


# ---- transitions -----------------------------------------------------------------------------------------------------


def test_a_transition_counts_what_the_fullest_rank_receives() -> None:
    costs = costs_of(load_simulation(LARGE))
    weights = (10, 20, 30, 40, 50, 60)  # four blocks
    costs = replace(costs, parameter_bytes=weights, optimizer_factor=3.0, send=Link(1000, 2.0))
    old = ParallelPlan(0, 2, 1, (3,), 2, "1f1b", None, 4)
    new = ParallelPlan(2, 1, 2, (), 1, "1f1b", None, 4)
    # Rank 0 held units 0..2: it receives 3..5 with two moments each. Rank 1 held 3..5: it receives the prefix alone.
    assert transition_bytes(old, new, costs=costs) == 3 * (40 + 50 + 60)
    assert transition_seconds(old, new, costs=costs, fixed_seconds=1.0) == pytest.approx(1.0 + (1000 + 900) / 1e9)
    # Pipelines of 2 and 3 on 6 ranks: rank 3 comes from the second place to the first, and holds nothing of it.
    two, three = ParallelPlan(0, 2, 3, (1,), 2, "1f1b", None, 4), ParallelPlan(0, 3, 2, (3, 5), 3, "1f1b", None, 4)
    assert transition_bytes(two, three, costs=costs) == 3 * max(20 + 30, 10, 40 + 50)
    assert transition_seconds(new, new, costs=costs, fixed_seconds=1.0) == 0.0


# ---- runs ------------------------------------------------------------------------------------------------------------


def test_a_run_adds_up(small: Path) -> None:
    segments = run_simulation(load_simulation(small))
    assert [(s.first_epoch, s.num_epochs, s.num_steps) for s in segments] == [(0, 2, 20), (2, 1, 10), (3, 1, 10)]
    assert [s.prediction.plan.frozen for s in segments] == [0, 2, 4]
    for segment in segments:
        expected = segment.num_steps * segment.prediction.step_seconds
        assert segment.seconds == expected + segment.transition_seconds + segment.advance_seconds
    assert segments[0].transition_seconds == segments[0].advance_seconds == 0.0
    assert all(s.transition_seconds > 0.25 for s in segments[1:])
    assert (
        segments[2].prediction.step_seconds < segments[1].prediction.step_seconds < segments[0].prediction.step_seconds
    )


def test_a_cache_is_taken_only_where_it_pays(small: Path) -> None:
    """Its advance takes one forward of a whole epoch; what it spares is one forward in each step that remains."""
    at_the_end = run_simulation(load_simulation(small, ["freeze.frozen=[0,0,0,2]", "cluster.transition_seconds=0.0"]))
    assert [s.prediction.plan.cached for s in at_the_end] == [None, None]
    early = run_simulation(load_simulation(small, ["freeze.frozen=[0,2,2,2]"]))
    assert [s.prediction.plan.cached for s in early] == [None, 2]
    assert early[1].advance_seconds > 0
    never = run_simulation(load_simulation(small, ["freeze.frozen=[0,2,2,2]", "pipe.cache=false"]))
    assert [s.prediction.plan.cached for s in never] == [None, None]


def test_what_is_not_elastic_stays(small: Path) -> None:
    kept = ["pipe.initial_length=2", "pipe.replicas=false", "pipe.schedules=[gpipe]"]
    segments = run_simulation(load_simulation(small, kept))
    assert [(s.prediction.plan.pp, s.prediction.plan.frozen) for s in segments] == [(2, 0), (2, 2), (2, 3)]
    free = run_simulation(load_simulation(small, ["pipe.initial_length=2"]))
    assert [s.prediction.plan.pp for s in free] == [2, 1, 1]


def test_a_run_that_freezes_at_once_starts_with_nothing_frozen(small: Path) -> None:
    """As training does: the first plan is of the whole model, and what is frozen from the start is a transition."""
    fixed = "pipe.initial_length=4"
    (frozen,) = run_simulation(load_simulation(small, ["freeze.frozen=[3,3,3,3]", fixed]))
    assert (frozen.first_epoch, frozen.num_epochs) == (0, 4)
    assert (frozen.prediction.plan.frozen, frozen.prediction.plan.pp) == (3, 1)
    assert frozen.transition_seconds > 0.25


def test_reads_cost_what_no_step_hides(small: Path) -> None:
    """A rank reads 16 samples of 10 tokens of width 8 at 4 bytes a step: 5,120 bytes."""
    run = ["train.epochs=31", f"freeze.frozen={[0, *[2] * 30]}", "cluster.transition_seconds=0.0"]
    hidden, shown, dear = (
        run_simulation(load_simulation(small, [*run, f"cluster.host.bytes_per_second={speed}"]))[1].prediction
        for speed in ("1 GB", "2500 kB", "1 MB")
    )
    assert (hidden.plan.cached, shown.plan.cached, dear.plan.cached) == (2, 2, None)
    assert shown.step_seconds == pytest.approx(5120 / 2.5e6 + 10e-6)
    assert hidden.step_seconds < shown.step_seconds < dear.step_seconds


@pytest.mark.parametrize("path", SIMULATIONS, ids=lambda path: path.stem)
def test_shipped_simulations_run(path: Path) -> None:
    segments = run_simulation(load_simulation(path))
    assert segments[-1].prediction.plan.frozen > 0


def test_a_plan_for_1024_ranks_takes_less_than_a_second() -> None:
    config = load_simulation(LARGE)
    constraints = Constraints(
        world_size=1024, global_batch_size=4096, schedules=(("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1)),
        num_microbatches=None, pipeline_lengths=(1, 2, 4, 8), memory_limit=config.cluster.memory,
    )  # fmt: skip
    costs = costs_of(config)
    start = time.perf_counter()
    best, *others = best_plans(0, cached=None, costs=costs, constraints=constraints, num_blocks=96, lines={})
    assert time.perf_counter() - start < 1.0
    assert best.plan.world_size == 1024 and len(others) > 2


def test_the_command_prints_a_table_and_draws(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = small.parent / "run.png"
    assert main(["simulate", str(small), f"--picture={picture}"]) == 0
    printed = capsys.readouterr().out
    assert "4 ranks, 4 blocks, 40 steps" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")


# ---- profiles --------------------------------------------------------------------------------------------------------


def test_a_profile_is_read_as_it_was_saved(tmp_path: Path) -> None:
    costs = costs_of(load_simulation(LARGE))
    profile = Profile({"model": "m", "rows": [4]}, costs, dict(costs.by_rows), 1e9)
    path = tmp_path / "folder" / file_name(profile.key)
    save_profile(profile, path)
    assert load_profile(path) == profile
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert file_name({"rows": [4], "model": "m"}) == path.name != file_name({"rows": [5], "model": "m"})


NO_PROFILES = (
    *("", "{}", "[1]", '{"job": 3}'),
    *(f'{{"version": {number}, "job": {{}}, "key": {{}}}}' for number in (1, 2)),
)


@pytest.mark.parametrize("content", NO_PROFILES)
def test_what_is_no_profile_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(content)
    with pytest.raises(UserError, match=r"\A[^\n]*profile.json: is no profile that this version reads[^\n]*\Z"):
        load_profile(path)


def test_the_page_of_keys_is_the_schema() -> None:
    assert (REPOSITORY / "docs" / "simulation.md").read_text() == simulation_page(), "run the command that it names"


# ---- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("freeze.frozen=[0,1]", r"freeze.frozen: \[0, 1\] is not allowed; give train.epochs = 4 numbers from 0 to 4"),
        ("freeze.frozen=[0,3,1,4]", r"freeze.frozen: .* none below the one before"),
        ("pipe.schedules=[pipedream]", r"pipe.schedules: pipedream is not known; give some of gpipe, 1f1b, inter"),
        ("pipe.schedules=[]", r"pipe.schedules: it is empty; give some of gpipe, 1f1b"),
        (
            "pipe.microbatches=99",
            r"pipe.microbatches: 99 suits no pipeline of 1, 2, 4 under 1f1b, .*; give one of 1, 2, 4, 8, 16",
        ),
        ("train.batch_size=3", r"train.batch_size: 3 is smaller than the 4 ranks; give at least 4"),
        ("pipe.initial_length=3", r"pipe.initial_length: 3 does not divide cluster.devices_per_node 4; give one of 1"),
        ("cluster.nodes=2", r"cluster.between: missing; give the link of a node to others"),
        (
            "cluster.memory=1 kB",
            r"cluster.memory: 1000 bytes hold no layout of this model with a pipeline of 1, 2, 4; give at",
        ),
        ("cluster.inside.bytes_per_second=fast", r"cluster.inside"),
        ("modell.blocks=3", r"modell: no such key; did you mean model\?"),
        (
            "cluster.inside={bytes_per_sec: 1 GB}",
            r"cluster.inside.bytes_per_sec: no such key; did you mean cluster.inside.bytes_per_second\?",
        ),
        (
            "cluster.between.latency=1",
            r"cluster.between.latency: no such key; did you mean cluster.between.latency_us\?",
        ),
    ],
)
def test_a_mistake_is_one_line(override: str, line: str, small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(small), override]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("error: ")
    with pytest.raises(UserError, match=line):
        run_simulation(load_simulation(small, [override]))


def test_no_command_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert main(["plann"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_a_cache_that_no_node_can_hold_is_not_used(small: Path) -> None:
    """640 samples of 10 tokens of 8 numbers of 4 bytes, on one node."""
    fits = 640 * 10 * 8 * 4
    for host_memory, is_cached in ((None, True), (fits, True), (fits - 1, False)):
        slow = "cluster.operations_per_second=1.0e8"  # so that reading gains more than planning's margin for it
        given = [slow] if host_memory is None else [slow, f"cluster.host_memory={host_memory}"]
        segments = run_simulation(load_simulation(small, given))
        assert any(s.prediction.plan.cached is not None for s in segments) == is_cached


@pytest.mark.parametrize("weight", [0, 3])
def test_a_backward_that_is_not_split_is_drawn_as_whole(weight: int) -> None:
    """Of stage 0 nothing can go ahead of the weights' part; the step ends behind the last sum of gradients."""
    stages = [StageCosts(2, 4, 4), StageCosts(2, 4, weight)]
    timeline = simulate("zero_bubble", stages, num_ranks=2, num_microbatches=4, reduce=[5, 5])
    axes = Figure().add_subplot()
    draw_timeline(axes, timeline, title="step")
    colours = {(bar.get_y() > 0.5, bar.get_facecolor()) for bar in axes.patches}
    assert len(colours) == (5 if weight else 4)  # forward and backward, of rank 1 in halves
    names = {text.get_text() for text in axes.get_legend().get_texts()}
    halves = {"backward of inputs", "backward of weights"} if weight else set()
    assert names == {"forward", "backward", "end: gradients summed, weights updated", *halves}
    assert axes.lines[0].get_xdata()[0] == timeline.total / 1e6 > max(span.stop for span in timeline.spans) / 1e6
