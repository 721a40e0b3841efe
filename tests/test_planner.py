"""The planner: every plan is valid, none is cheaper, and each switch of the configuration keeps what it says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations
from random import Random
from typing import Any

import pytest

from pipetransformer.config import Config
from pipetransformer.errors import UserError
from pipetransformer.pipe.planner import memory
from pipetransformer.pipe.planner import search as planner
from pipetransformer.pipe.planner.answers import Outlook
from pipetransformer.pipe.planner.calibration import Line
from pipetransformer.pipe.planner.choice import Planner
from pipetransformer.pipe.planner.constraints import Constraints, divisors
from pipetransformer.pipe.planner.costs import JobCosts, Link, UnitCosts
from pipetransformer.pipe.planner.microbatches import microbatch_choices
from pipetransformer.pipe.planner.search import best_plans
from pipetransformer.pipe.planner.step_simulator import StageCosts, simulate
from pipetransformer.plan import PREFIXES, ParallelPlan
from pipetransformer.plan.prefix import cached_choices
from pipetransformer.plan.schedules import why_not

NUM_JOBS = 300


def unit_costs(rows: int, step_ns: list[int], *, activation: list[int], boundary: list[int]) -> UnitCosts:
    forward = [ns // 3 for ns in step_ns]
    backward = [ns - f for ns, f in zip(step_ns, forward)]
    prefix = [ns // 4 for ns in step_ns]
    weights = [ns // 2 for ns in backward]
    again, entering = [ns // 5 for ns in step_ns], [max(boundary), *boundary[:-1]]
    kept = [received + num_bytes // 4 for received, num_bytes in zip(entering, activation)]
    activation = [received + num_bytes for received, num_bytes in zip(entering, activation)]
    working, frozen, between = ([factor * num_bytes for num_bytes in boundary] for factor in (2, 3, 4))
    columns = (
        forward, backward, activation, boundary, prefix, weights, again, kept, entering, working, frozen, between,
    )  # fmt: skip
    return UnitCosts(rows, 0, *map(tuple, columns))


def even_job(num_units: int, **changes: object) -> JobCosts:
    """A chain of equal units: 30 ns and 1 byte of activations a row, 10 bytes of weights, free links."""
    ones, nothing = (1,) * num_units, (0,) * num_units
    unit = unit_costs(1, [30] * num_units, activation=[1] * num_units, boundary=[1] * num_units)
    unit = replace(unit, activation_bytes=ones, kept_bytes=ones)
    job = JobCosts(
        by_rows={1: replace(unit, entering_bytes=nothing, working_bytes=nothing, prefix_bytes=nothing)},
        parameter_bytes=(10,) * num_units,
        optimizer_factor=3.0,
        update_ns_per_byte=0.0,
        send=Link(0, 0.0),
        reduction=Link(0, 0.0),
        num_ranks=8,
    )
    return replace(job, **changes)  # type: ignore[arg-type]


def random_job(random: Random, num_units: int) -> JobCosts:
    def draw(largest: int) -> list[int]:
        return [random.randint(0, largest) for _ in range(num_units)]

    by_rows = {
        rows: unit_costs(rows, draw(10**6), activation=draw(1000), boundary=draw(1000))
        for rows in random.sample([1, 2, 3, 4, 8, 16, 32], k=random.randint(1, 3))
    }
    recompute = random.choice(["never", "never", "except_last", "always"])
    if recompute == "never":
        by_rows = {rows: replace(costs, kept_bytes=costs.activation_bytes) for rows, costs in by_rows.items()}
    return JobCosts(
        by_rows=by_rows,
        recompute=recompute,
        parameter_bytes=tuple(draw(1000)),
        optimizer_factor=random.choice([1.0, 2.0, 3.0]),
        update_ns_per_byte=random.uniform(0, 100),
        send=Link(random.randint(0, 10**5), random.uniform(0, 100)),
        reduction=Link(random.randint(0, 10**5), random.uniform(0, 100)),
        num_ranks=8,
        overlap=random.choice([0.0, 0.5]),
        keeps_boundaries=random.choice([False, True]),
    )


def random_case(random: Random) -> dict[str, object]:
    """Arguments of ``best_plans``."""
    num_blocks = random.randint(1, 8)
    frozen = random.randint(0, num_blocks)
    world_size = random.choice([1, 2, 3, 4, 6, 8])
    pipeline_lengths = divisors(world_size)
    constraints = Constraints(
        world_size=world_size,
        global_batch_size=random.randint(1, 70),
        schedules=random.choice(
            [(("gpipe", 1),), (("1f1b", 1),), (("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1))]
        ),
        num_microbatches=random.choice([None, None, random.randint(1, 8)]),
        pipeline_lengths=pipeline_lengths,
        memory_limit=random.choice([None, random.randint(1000, 60_000)]),
    )
    return {
        "frozen": frozen,
        "cached": random.choice([None, random.randint(1, frozen)]) if frozen else None,
        "costs": random_job(random, num_blocks + 2),
        "constraints": constraints,
        "num_blocks": num_blocks,
        "lines": {
            pp: Line(random.choice([0.0, random.uniform(0, 1e-5)]), random.uniform(0.5, 2))
            for pp in pipeline_lengths
            if random.random() < 0.5
        },
    }


# The cost function, written a second time from its definition, for one plan


def predict(plan: ParallelPlan, costs: JobCosts, *, batch: int, line: Line) -> tuple[list[int], float, int]:
    """(each stage in ns, seconds of a step, bytes on the fullest rank) of ``plan``."""
    share = -(-batch // plan.dp)
    unit = costs.unit_costs(-(-share // plan.num_microbatches))
    last = plan.pp * plan.stages_per_rank - 1
    stages, stage_ns = [], []
    weights, held = [0] * plan.pp, [sum(costs.parameter_bytes[u] for u in range(plan.first_active))] * plan.pp
    computed_prefix = [u for u in range(plan.first_active) if plan.cached is None or u > plan.cached]
    for stage in range(last + 1):
        units = plan.stage_units(stage)
        forward, backward, weight = (
            sum(column[u] for u in units) for column in (unit.forward_ns, unit.backward_ns, unit.weight_ns)
        )
        share = 0.0
        if costs.recompute != "never":
            share = (plan.num_microbatches - (costs.recompute == "except_last")) / plan.num_microbatches
        again = sum(round(unit.recompute_ns[u] * share) for u in units)
        received, sent = (unit.boundary_bytes[u] for u in (units.start - 1, units.stop - 1))
        crossing = [received] * (stage > 0) + [sent] * (stage < last)
        stage_ns.append(forward + backward + again + sum(2 * costs.send.ns(num_bytes) for num_bytes in crossing))
        backward += round(sum(unit.recompute_ns[u] for u in units) * share)
        apart = weight if costs.recompute == "never" else 0
        stages.append(
            StageCosts(
                forward,
                backward,
                apart if stage else backward,
                costs.send.bytes_ns(sent),
                costs.send.bytes_ns(received) if stage else 0,
            )
        )
        weights[stage % plan.pp] += sum(costs.parameter_bytes[u] for u in units)
        if plan.stages_per_rank == 1:
            lasting = sum(round(costs.parameter_bytes[u] * costs.optimizer_factor) for u in units)
            advance = lasting + advance_bytes(plan, unit, rows=-(-batch // plan.world_size))
            held[stage] += max(stage_bytes(plan, stage, costs, unit, computed_prefix), advance)
    timeline = simulate(
        "1f1b" if plan.pp == 1 else plan.schedule,
        stages,
        num_ranks=plan.pp,
        num_microbatches=plan.num_microbatches,
        latency=costs.send.latency_ns,
        first=sum(unit.prefix_ns[u] for u in computed_prefix) * plan.num_microbatches,
        reduce=[costs.reduction_ns(w, num_replicas=plan.dp) for w in weights],
        update=[round(w * costs.update_ns_per_byte) for w in weights],
        overlap=costs.overlap,
    )
    return stage_ns, round(line.constant * 1e9 + timeline.total * line.slope) / 1e9, max(held)


def advance_bytes(plan: ParallelPlan, unit: UnitCosts, *, rows: int) -> int:
    """The most that a forward of the advance pass holds."""
    units = range(0 if plan.cached is None else plan.cached + 1)
    return max((round(rows / unit.rows * (unit.prefix_bytes[u] + unit.entering_bytes[u])) for u in units), default=0)


def stage_bytes(plan: ParallelPlan, stage: int, costs: JobCosts, unit: UnitCosts, computed_prefix: list[int]) -> int:
    """The most that the rank of a stage holds beside the weights of the prefix."""
    m, units = plan.num_microbatches, plan.stage_units(stage)
    alive = m if plan.schedule == "gpipe" else min(m, plan.pp - stage)
    is_rerun = costs.recompute == "always" or (costs.recompute == "except_last" and m > 1)
    if plan.schedule == "zero_bubble" and not (is_rerun and stage):  # weights are put off
        alive = min(m, plan.pp)
    alive = 1 if plan.pp == 1 else alive
    ends_whole = costs.recompute == "except_last" and m > 1
    halved = 0  # whose backward is split and half done, at the peak
    if plan.schedule == "zero_bubble" and stage and not (is_rerun and not ends_whole):
        halved = 1 if ends_whole else min(m, stage + 1)
    is_first_halved = halved > 0 and not ends_whole
    reruns = is_rerun and not (ends_whole and alive == 1)  # at the peak
    # Under zero_bubble: behind the first backward of weights, whose gradients stay, the next one of inputs begins.
    total = before = later = 0  # later: by how much that moment holds more than the peak in front of it
    for u in units:
        entering = unit.entering_bytes[u] if u == plan.first_active else 0  # it is in the batch
        whole = unit.activation_bytes[u] - entering
        kept = unit.kept_bytes[u] - entering if is_rerun else whole
        lasting, gradient = round(costs.parameter_bytes[u] * costs.optimizer_factor), costs.parameter_bytes[u]
        total += lasting + m * entering + (alive - 1) * kept + ends_whole * (whole - kept)
        if plan.dp > 1 or m > alive:
            total += kept + gradient + halved * unit.between_bytes[u]
        else:
            first = is_first_halved * unit.between_bytes[u]
            later += gradient + first - max(kept + first, gradient)
            total += max(kept + first, gradient) + halved * unit.between_bytes[u] - first
        before += lasting + (gradient if plan.dp > 1 else 0)
    is_later = 0 < halved < m and later > 0
    total += later if is_later else 0
    total += max(unit.working_bytes[u] + reruns * (unit.activation_bytes[u] - unit.kept_bytes[u]) for u in units)
    if plan.pp > 1:
        is_first, is_last, keeps_sends = stage == 0, stage == plan.pp - 1, plan.schedule == "zero_bubble"
        num_halved = min(halved, 1 if alive == 1 else 0) if ends_whole else halved
        if costs.keeps_boundaries:
            outputs, inputs, received = m if keeps_sends else alive, m - alive, m - 1
        else:
            outputs, received = alive - num_halved if keeps_sends else 0, 0
            inputs = m - alive if is_last and (ends_whole or not halved) else 0  # leaves
        num_held = 0 if is_first else inputs + keeps_sends * (m - alive + num_halved)
        num_held += 0 if is_last else outputs + received
        num_held += 2 * is_later * costs.keeps_boundaries  # its own input gradient, and the one before it
        widest = max(unit.entering_bytes[plan.first_active + 1 :])
        total += num_held * widest
        before += m * widest * (is_first and costs.keeps_boundaries)
    if stage == 0 and computed_prefix:
        start = computed_prefix[0]
        frozen = [unit.prefix_bytes[u] + (u > start) * unit.entering_bytes[u] for u in computed_prefix]
        total = max(total, before + m * (unit.entering_bytes[start] + max(frozen)))
    return total


def search(
    frozen: int,
    *,
    cached: int | None,
    costs: JobCosts,
    constraints: Constraints,
    num_blocks: int,
    lines: Mapping[int, Line],
) -> tuple[float, int, int, tuple[int, ...]] | None:
    """The least (seconds, pp, M, boundaries): every pp, every M, and of their cuts the most even one that fits."""
    found = []
    first = frozen + 1 if frozen else 0
    ((schedule, _),) = constraints.schedules
    for pp in constraints.pipeline_lengths:
        dp = constraints.world_size // pp
        share = -(-constraints.global_batch_size // dp)
        fixed = constraints.num_microbatches
        for m in microbatch_choices(share, pp=pp) if fixed is None else (fixed,):
            if m > share or (schedule == "1f1b" and m < pp):
                continue
            cuts = []
            for boundaries in combinations(range(first + 1, num_blocks + 2), pp - 1):
                plan = ParallelPlan(frozen, pp, dp, boundaries, m, schedule, cached, num_blocks)
                each, seconds, num_bytes = predict(
                    plan, costs, batch=constraints.global_batch_size, line=lines.get(pp, Line())
                )
                if constraints.memory_limit is None or num_bytes <= constraints.memory_limit:
                    cuts.append((max(each), -min(each), boundaries, seconds))
            if cuts:
                *_, boundaries, seconds = min(cuts)
                found.append((seconds, pp, m, boundaries))
    return min(found, default=None)


# The planner


def test_the_plan_is_what_exhaustive_search_finds() -> None:
    random = Random(0)
    num_refused = 0
    for _ in range(NUM_JOBS):
        case = random_case(random)
        if len(case["constraints"].schedules) > 1:  # type: ignore[attr-defined]
            continue
        best = next(iter(best_plans(**case)), None)  # type: ignore[arg-type]
        expected = search(**case)  # type: ignore[arg-type]
        found = best and (best.step_seconds, best.plan.pp, best.plan.num_microbatches, best.plan.boundaries)
        assert found == expected, case
        num_refused += best is None
    assert 0 < num_refused < NUM_JOBS / 2


def test_every_weighed_plan_is_valid_and_told_as_it_is() -> None:
    random, seen = Random(1), set()
    for _ in range(NUM_JOBS):
        case = random_case(random)
        constraints, lines = case["constraints"], case["lines"]
        assert isinstance(constraints, Constraints) and isinstance(lines, dict)
        weighed = best_plans(**case)  # type: ignore[arg-type]
        assert list(weighed) == sorted(weighed, key=lambda p: (p.step_seconds, p.plan.pp, p.plan.num_microbatches))
        for prediction in weighed:
            plan = prediction.plan
            assert plan.world_size == constraints.world_size
            assert (plan.frozen, plan.cached) == (case["frozen"], case["cached"])
            assert plan.pp == 1 or (plan.schedule, plan.stages_per_rank) in constraints.schedules
            assert plan.num_microbatches <= -(-constraints.global_batch_size // plan.dp)
            assert constraints.memory_limit is None or max(prediction.memory_bytes) <= constraints.memory_limit
            assert 0 <= prediction.bubble < 1
            seen.add(plan.schedule)
            _, seconds, num_bytes = predict(
                plan,
                case["costs"],  # type: ignore[arg-type]
                batch=constraints.global_batch_size,
                line=lines.get(plan.pp, Line()),
            )
            assert prediction.step_seconds == seconds
            if plan.stages_per_rank == 1:
                assert max(prediction.memory_bytes) == num_bytes
    assert seen == {"gpipe", "1f1b", "interleaved", "zero_bubble"}


def test_a_cut_fits_where_the_prediction_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Into exactly as many bytes as each rank is predicted to hold in a step, and into no byte less."""
    monkeypatch.setattr(planner, "advance_bytes", lambda *_, **__: 0)
    random = Random(3)
    for _ in range(NUM_JOBS):
        num_blocks, pp, dp = random.randint(3, 8), random.choice([1, 2, 3]), random.choice([1, 2])
        frozen, m = random.randint(0, num_blocks - 2), random.randint(pp, 12)
        cached = random.choice([None, random.randint(1, frozen)]) if frozen else None
        first, costs = frozen + 1 if frozen else 0, random_job(random, num_blocks + 2)
        boundaries = tuple(sorted(random.sample(range(first + 1, num_blocks + 2), pp - 1)))
        schedule = random.choice(["gpipe", "1f1b", "zero_bubble"]) if pp > 1 else "1f1b"
        if why_not(schedule, num_ranks=pp, num_microbatches=m) is not None:
            continue
        plan = ParallelPlan(frozen, pp, dp, boundaries, m, schedule, cached, num_blocks)
        prediction = planner.predict(plan, costs=costs, global_batch_size=m * dp)
        unit = planner.unit_costs(plan, costs, global_batch_size=m * dp)
        prefix = memory.prefix_bytes(plan, unit, costs)
        for rank, num_bytes in enumerate(prediction.memory_bytes):
            limit = num_bytes - sum(costs.parameter_bytes[:first])
            for allowed in (limit, limit - 1):
                rows, working = memory.cut_bytes(
                    memory.works_of(plan, costs),
                    memory.unit_bytes(plan, unit, costs)[first:],
                    before=prefix,
                    limit=allowed,
                )
                mine = slice(*(u - first for u in ((first, *boundaries)[rank], (*boundaries, num_blocks + 2)[rank])))
                assert (sum(rows[rank][mine]) + max(working[rank][mine]) <= allowed) == (allowed == limit), plan


def test_a_decision_depends_on_numbers_alone() -> None:
    random = Random(2)
    for _ in range(30):
        case = random_case(random)
        costs = case["costs"]
        assert isinstance(costs, JobCosts)
        shuffled = replace(costs, by_rows=dict(reversed(costs.by_rows.items())))
        assert best_plans(**case) == best_plans(**{**case, "costs": shuffled})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("memory_limit", "expected"),
    [
        (None, 1),
        (4 * (40 + 8), 1),  # 40 bytes a unit for weights, gradients and moments, and 8 rows of activations
        (4 * (40 + 8) - 1, 2),
        (4 * (40 + 1), 8),
        (4 * (40 + 1) - 1, None),
    ],
)
def test_a_plain_loop_splits_its_batch_for_memory(memory_limit: int | None, expected: int | None) -> None:
    constraints = Constraints(
        world_size=2, global_batch_size=16, schedules=(("1f1b", 1),), num_microbatches=None, pipeline_lengths=(1,),
        memory_limit=memory_limit,
    )  # fmt: skip
    found = best_plans(0, cached=None, costs=even_job(4), constraints=constraints, num_blocks=2, lines={})
    assert next((best.plan.num_microbatches for best in found), None) == expected


@pytest.mark.parametrize(("parked_from", "parked"), [(None, 0), (0, 2), (1, 1), (2, 0)])
def test_optimizer_state_that_stays_with_frozen_units_counts(parked_from: int | None, parked: int) -> None:
    """Units 0 and 1 are frozen, 2 and 3 train: 10 bytes of weights each, and 20 of optimizer state."""
    limit = 2 * 10 + 20 * parked + 2 * (40 + 1)

    def fits(limit: int) -> bool:
        constraints = Constraints(
            world_size=2, global_batch_size=16, schedules=(("1f1b", 1),), num_microbatches=None, pipeline_lengths=(1,),
            memory_limit=limit,
        )  # fmt: skip
        costs = even_job(4, parked_from=parked_from)
        return bool(best_plans(1, cached=1, costs=costs, constraints=constraints, num_blocks=2, lines={}))

    assert fits(limit) and not fits(limit - 1)


@pytest.mark.parametrize(
    ("frozen", "cut", "expected"),
    [
        (0, (3, 6), (3, 6)),
        (1, (3, 6), (3, 6)),
        (2, (3, 6), (4, 6)),  # units 0..2 are frozen: stage 0 keeps unit 3
        (4, (3, 6), (6, 7)),
        (6, (3, 6), None),  # one active unit is left for three stages
    ],
)
def test_a_fixed_cut_moves_only_where_a_stage_would_be_empty(
    frozen: int, cut: tuple[int, ...], expected: tuple[int, ...] | None
) -> None:
    constraints = Constraints(
        world_size=3, global_batch_size=12, schedules=(("gpipe", 1),), num_microbatches=4, pipeline_lengths=(3,),
        memory_limit=None, fixed_cut=cut,
    )  # fmt: skip
    found = best_plans(frozen, cached=None, costs=even_job(8), constraints=constraints, num_blocks=6, lines={})
    assert next((best.plan.boundaries for best in found), None) == expected


@pytest.mark.parametrize(("number", "expected"), [(1, (1,)), (6, (1, 2, 3, 6)), (7, (1, 7))])
def test_divisors(number: int, expected: tuple[int, ...]) -> None:
    assert divisors(number) == expected


# The choice

JOB = even_job(8, update_ns_per_byte=1.0)  # 6 blocks; pp = 1 is the fastest, since no pipeline fills


def make_planner(*, world_size: int = 4, num_blocks: int = 6, **sections: dict[str, object]) -> Planner:
    config = Config.model_validate(
        {
            "task": "image_classification",
            "model": {"name": "any"},
            "data": {"name": "digits"},
            "train": {"epochs": 1, "batch_size": 32, "lr": 0.1},
            **sections,
        }
    )
    return Planner.of(config, num_blocks=num_blocks, world_size=world_size, local_size=world_size)


def plan_after(controller: Planner, frozen: int, current: ParallelPlan, *, costs: JobCosts = JOB) -> ParallelPlan:
    choice = controller.next_plan(frozen, cached_options={None: 0.0}, current=current, outlook=Outlook(costs, 100))
    return choice.plan


def test_a_shape_that_was_not_timed_lies_on_the_line_through_its_neighbours() -> None:
    """Times of 4, 8 and 32 rows; in proportion, small micro-batches would take no time beside that of their rows."""
    seconds = {4: 80, 8: 100, 32: 300}
    measured = {
        rows: unit_costs(rows, [time * 12] * 3, activation=[rows] * 3, boundary=[rows] * 3)
        for rows, time in seconds.items()
    }
    costs = replace(even_job(3), by_rows=measured)
    found = {rows: sum(costs.unit_costs(rows).step_ns) / 36 for rows in (2, 4, 6, 8, 20, 32, 64)}
    assert found == pytest.approx({2: 70, 4: 80, 6: 90, 8: 100, 20: 200, 32: 300, 64: 566.67}, abs=0.1)
    assert [costs.unit_costs(rows).boundary_bytes[0] for rows in (2, 6, 8, 20, 64)] == [2, 6, 8, 20, 64]
    alone = replace(costs, by_rows={8: measured[8]})
    assert sum(alone.unit_costs(4).step_ns) / 36 == pytest.approx(50, abs=0.1)


@pytest.mark.parametrize(
    ("faster", "limit", "expected"),
    [
        (0.0, None, 1),  # in proportion, as a shape that was not timed counts: rounding must not decide
        (0.07, None, 1),  # may be noise
        (0.15, None, 4),  # 16 rows lie on the line: 5 % faster
        (0.0, 495, 2),  # what does not fit is no alternative
    ],
)
def test_a_plain_loop_keeps_its_rows_together_unless_it_pays(faster: float, limit: int | None, expected: int) -> None:
    """8 units of 32 rows; 8 rows take a little less than a quarter of 32."""
    job = even_job(8)
    ns = [960_001] * 8
    whole = replace(unit_costs(32, ns, activation=[32] * 8, boundary=[0] * 8), kept_bytes=(32,) * 8)
    less = [round((1 - faster) * each / 4 - 1) for each in ns]
    quarter = replace(unit_costs(8, less, activation=[8] * 8, boundary=[0] * 8), kept_bytes=(8,) * 8)
    nothing = dict.fromkeys(("entering_bytes", "working_bytes", "prefix_bytes"), (0,) * 8)
    by_rows = {rows.rows: replace(rows, **nothing) for rows in (whole, quarter)}  # type: ignore[arg-type]
    costs = replace(job, by_rows=by_rows, num_ranks=1)
    sections = {} if limit is None else {"pipe": {"memory_limit": limit}}
    choice = make_planner(world_size=1, **sections).first_plan(costs, {})
    assert choice.plan.num_microbatches == expected


@pytest.mark.parametrize(("initial_length", "first"), [("auto", 1), (1, 1), (2, 2), (4, 4)])
def test_initial_length_holds_for_the_first_plan_alone(initial_length: object, first: int) -> None:
    controller = make_planner(pipe={"initial_length": initial_length})
    plan = controller.first_plan(JOB, {}).plan
    assert (plan.pp, plan.dp) == (first, 4 // first)
    assert plan_after(controller, 0, plan).pp == first
    assert plan_after(controller, 2, plan).pp == 1
    assert controller.max_frozen(plan) == 6


def test_without_autodp_the_mesh_stays_and_the_cut_moves() -> None:
    controller = make_planner(pipe={"initial_length": 2}, dp={"enabled": False})
    first = controller.first_plan(JOB, {}).plan
    second = plan_after(controller, 3, first)
    assert (first.boundaries, second.boundaries) == ((4,), (6,))
    assert (second.pp, second.dp) == (2, 2)


def test_without_autopipe_the_cut_and_the_microbatches_stay() -> None:
    controller = make_planner(pipe={"initial_length": 2, "enabled": False})
    first = controller.first_plan(JOB, {}).plan
    dear = replace(JOB, send=Link(10**9, 0.0))  # would ask for another M
    assert plan_after(controller, 3, first, costs=dear) == replace(first, frozen=3, boundaries=(5,))
    assert plan_after(controller, 2, first, costs=dear) == replace(first, frozen=2)


@pytest.mark.parametrize("section", [{"dp": {"enabled": False}}, {"pipe": {"enabled": False, "initial_length": 4}}])
@pytest.mark.parametrize(("num_blocks", "max_frozen"), [(6, 3), (3, 0), (2, 0)])
def test_a_kept_pipeline_keeps_a_unit_a_stage(
    section: dict[str, dict[str, object]], num_blocks: int, max_frozen: int
) -> None:
    controller = make_planner(num_blocks=num_blocks, **{"pipe": {"initial_length": 4}, **section})
    job = even_job(num_blocks + 2)
    first = controller.first_plan(job, {}).plan
    assert controller.max_frozen(first) == max_frozen
    if max_frozen:
        assert plan_after(controller, max_frozen, first, costs=job).pp == 4


@pytest.mark.parametrize(("remaining_steps", "cached"), [(1, None), (1000, 4)])
def test_an_advance_is_taken_where_it_pays(remaining_steps: int, cached: int | None) -> None:
    controller = make_planner()
    choice = controller.next_plan(
        4,
        cached_options={None: 0.0, 4: 10e-6},  # the prefix of 5 units takes 10 ns a row, 8 rows: 0.4 us a step
        current=controller.first_plan(JOB, {}).plan,
        outlook=Outlook(JOB, remaining_steps),
    )
    assert choice.plan.cached == cached
    assert {option for *_, option, _ in choice.weighed} == {None, 4}


@pytest.mark.parametrize(("gain", "cached"), [(0.015, None), (0.025, 4)])
def test_a_cache_is_filled_for_more_than_a_fiftieth_of_the_rest(gain: float, cached: int | None) -> None:
    controller, steps = make_planner(), 1000
    first = controller.first_plan(JOB, {}).plan

    def seconds(options: dict[int | None, float]) -> float:
        choice = controller.next_plan(4, cached_options=options, current=first, outlook=Outlook(JOB, steps))
        return choice.prediction.step_seconds * steps + choice.transition_seconds

    without, read = seconds({None: 0.0}), seconds({4: 0.0})
    options = {None: 0.0, 4: (1 - gain) * without - read}
    choice = controller.next_plan(4, cached_options=options, current=first, outlook=Outlook(JOB, steps))
    assert choice.plan.cached == cached


def test_timed_steps_decide_between_lengths() -> None:
    assert make_planner().first_plan(JOB, {1: Line(slope=100.0), 4: Line(slope=100.0)}).plan.pp == 2
    assert make_planner().first_plan(JOB, {1: Line(1.0), 4: Line(1.0)}).plan.pp == 2


def test_static_layouts_are_one_a_length() -> None:
    layouts = make_planner(pipe={"initial_length": 2}).static_layouts(JOB)
    assert [(p.plan.frozen, p.plan.pp, p.plan.cached) for p in layouts] == [(0, 1, None), (0, 2, None), (0, 4, None)]


def test_what_cannot_fit_is_one_line() -> None:
    controller = make_planner(pipe={"memory_limit": 50})
    with pytest.raises(
        UserError, match=r"\Apipe\.memory_limit: 50 bytes hold no layout [^\n]*; give at least \d+\Z"
    ) as told:
        controller.first_plan(JOB, {})
    least = int(str(told.value).rpartition(" ")[2])
    make_planner(pipe={"memory_limit": least}).first_plan(JOB, {})
    with pytest.raises(UserError, match=f"give (dp.shard=[a-z]+, or )?at least {least}$"):
        make_planner(pipe={"memory_limit": least - 1}).first_plan(JOB, {})


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"memory_limit": 50},
            "device memory: 50 bytes hold no layout of this model with a pipeline of 1, 2, 4, which",
        ),
        (
            {"num_microbatches": 33},
            "pipe.microbatches: 33 suits no pipeline of 1, 2, 4 under 1f1b; give one of 1, 2, 4, 8",
        ),
        (
            {"num_microbatches": 3, "pipeline_lengths": (4,)},
            "pipe.microbatches: 3 suits no pipeline of 4 under 1f1b; give one of 4, 8, 16",
        ),
        (
            {"schedules": (("interleaved", 3),), "pipeline_lengths": (4,)},
            "pipe.initial_length: a pipeline of 4 has 12 stages or more, and the model 8 units; give a shorter one",
        ),
        (
            {"global_batch_size": 3, "pipeline_lengths": (4,)},
            "train.batch_size: 3 samples give no pipeline of 4 a micro-batch for each rank; give at least 4",
        ),
    ],
)
def test_each_reason_why_nothing_fits_has_its_own_line(changes: dict[str, Any], line: str) -> None:
    first = Constraints(
        world_size=4, global_batch_size=32, schedules=(("1f1b", 1),), num_microbatches=None, pipeline_lengths=(1, 2, 4),
        memory_limit=None,
    )  # fmt: skip
    controller = Planner(replace(first, **changes), num_blocks=6, local_size=4)
    with pytest.raises(UserError) as told:
        controller.first_plan(JOB, {})
    assert str(told.value).startswith(line) and "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("frozen", "held", "choices"),
    [
        (0, None, (None,)),
        (2, None, (None, 2)),
        (3, 2, (None, 2, 3)),
        (2, 2, (None, 2)),
        (1, 2, (None, 1)),
        (0, 2, (None,)),
    ],
)
def test_a_prefix_may_be_computed_or_read_where_the_cache_is_or_at_n(
    frozen: int, held: int | None, choices: tuple[int | None, ...]
) -> None:
    assert cached_choices(frozen, held=held) == choices


FREE = Constraints(
    world_size=4, global_batch_size=32, schedules=(("1f1b", 1),), num_microbatches=None, pipeline_lengths=(1, 2, 4),
    memory_limit=None,
)  # fmt: skip


def test_a_prefix_is_computed_where_reads_take_longer() -> None:
    """Also where the cache holds activations already; and read where they take less."""
    controller = Planner(FREE, num_blocks=6, local_size=4)
    first = controller.first_plan(JOB, {}).plan
    options = dict.fromkeys(cached_choices(4, held=4), 0.0)
    for read, expected in ((Link(0, 1e9), None), (Link(0, 0.0), 4)):
        choice = controller.next_plan(
            4, cached_options=options, current=first, outlook=Outlook(replace(JOB, read=read), 100)
        )
        assert choice is not None and choice.plan.cached == expected


@pytest.mark.parametrize("limit", range(-3, 1))
def test_nothing_fits_where_the_prefix_alone_does_not(limit: int) -> None:
    for pp in (1, 2):
        allowed = replace(FREE, pipeline_lengths=(pp,), memory_limit=sum(JOB.parameter_bytes[:4]) + limit)
        assert best_plans(3, cached=None, costs=JOB, constraints=allowed, num_blocks=6, lines={}) == ()


def test_what_fits_unfrozen_fits_with_any_number_of_frozen_blocks() -> None:
    """Without a cache, in the memory that some unfrozen plan of one stage a rank takes."""
    for number in range(NUM_JOBS):
        random = Random(number)
        given = random_case(random)
        free = replace(given["constraints"], memory_limit=None, schedules=(("1f1b", 1),))  # type: ignore[type-var]
        others = {key: given[key] for key in ("costs", "num_blocks", "lines")}
        plans: Any = best_plans(0, cached=None, constraints=free, **others)  # type: ignore[arg-type]
        if not plans:
            continue
        limit = max(random.choice(plans).memory_bytes)
        for frozen in range(1, int(str(given["num_blocks"])) + 1):
            constraints = replace(free, memory_limit=limit, prefixes=PREFIXES)
            found = best_plans(frozen, cached=None, constraints=constraints, **others)  # type: ignore[arg-type]
            assert found, (number, frozen, limit)


def test_several_stages_a_rank_are_cut_for_memory_where_the_fastest_cut_does_not_fit() -> None:
    random, found = Random(4), 0
    for _ in range(40):
        costs = random_job(random, 10)
        free = replace(FREE, schedules=(("interleaved", 2),), pipeline_lengths=(2,), num_microbatches=4)
        given: dict[str, Any] = {"cached": None, "costs": costs, "num_blocks": 8, "lines": {}}
        fastest, *_ = best_plans(0, constraints=free, **given)
        limit = max(fastest.memory_bytes) - 1
        other = next(iter(best_plans(0, constraints=replace(free, memory_limit=limit), **given)), None)
        if other is not None:
            assert max(other.memory_bytes) <= limit and other.plan.boundaries != fastest.plan.boundaries
            found += 1
    assert found > 10


def test_one_steady_plan_is_that_of_all() -> None:
    controller = make_planner()
    plans = {each.plan.frozen: each for each in controller.steady_plans(JOB, has_cache=True)}
    assert {n: controller.steady_plan(n, JOB, has_cache=True) for n in plans} == plans and len(plans) > 2
    assert make_planner(pipe={"memory_limit": 50}).steady_plan(0, JOB, has_cache=True) is None
