"""How many blocks freeze: as many as are wanted, as far as some plan takes them."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
from test_planner import JOB, make_planner, plan_after

from pipetransformer.errors import UserError
from pipetransformer.pipe.planner.answers import Choice, Outlook
from pipetransformer.pipe.planner.calibration import Line
from pipetransformer.pipe.planner.choice import Planner
from pipetransformer.pipe.planner.costs import JobCosts
from pipetransformer.plan import ParallelPlan


def settled(controller: Planner, wanted: int, current: ParallelPlan, *, costs: JobCosts = JOB) -> tuple[int, str, bool]:
    """(n from now on, the obstacle, whether another plan is taken)."""
    found = controller.settle(wanted, current=current, options=lambda n: {None: 0.0}, outlook=Outlook(costs, 100))
    assert found.choice is None or found.choice.plan.frozen == found.frozen
    return found.frozen, found.reason, found.choice is not None


@pytest.mark.parametrize(
    ("line", "epochs", "cached"),
    [
        *((Line(slope=slope), epochs, cached) for slope in (0.5, 1.0, 3.0) for epochs, cached in ((1, None), (2, 4))),
        (Line(1e-6, 0.0), 2, None),  # longer steps are no slower: nothing is saved, and an advance is not free
    ],
)
def test_an_advance_pass_costs_an_epoch_of_the_same_forwards(line: Line, epochs: int, cached: int | None) -> None:
    """However much slower than measured steps are: all samples pass the prefix once in either."""
    controller, steps = make_planner(pipe={"initial_length": 1}, dp={"enabled": False}), 1000
    first = controller.first_plan(JOB, {}).plan

    def step_seconds(option: int | None) -> float:
        choice = controller.next_plan(4, cached_options={option: 0.0}, current=first, outlook=Outlook(JOB, 10**9))
        assert choice is not None
        return choice.prediction.step_seconds

    advance = steps * (step_seconds(None) - step_seconds(4))
    outlook = Outlook(JOB, steps * epochs, {1: line, 2: Line(slope=9.0)})
    choice = controller.next_plan(4, cached_options={None: 0.0, 4: advance}, current=first, outlook=outlook)
    assert choice is not None and choice.plan.cached == cached
    assert outlook.slope == (line.slope or 1.0), "an advance pass is never free"

    def spent(seconds: float) -> float:
        return controller.gains(4, current=first, options=lambda _: {None: 0.0, 4: seconds}, outlook=outlook)[1]

    if cached is not None:
        assert spent(advance) - spent(0.0) == pytest.approx(line.slope * advance)


def test_as_many_blocks_freeze_as_are_wanted() -> None:
    controller = make_planner()
    plan = controller.first_plan(JOB, {}).plan
    assert settled(controller, 4, plan) == (4, "", True)
    assert settled(controller, 0, plan) == (0, "", False)
    assert settled(controller, 2, replace(plan, frozen=4)) == (2, "", True), "blocks thaw"


def test_a_thaw_that_no_layout_takes_is_told() -> None:
    controller = make_planner()
    plan = replace(controller.first_plan(JOB, {}).plan, frozen=4)
    with mock.patch.object(Planner, "next_plan", lambda *_, **__: None):
        assert settled(controller, 2, plan) == (4, "no layout fits in memory", False)


def test_only_new_costs_change_the_plan_of_the_same_blocks_and_only_where_it_pays() -> None:
    controller = make_planner()
    best, slow = controller.first_plan(JOB, {}).plan, make_planner(pipe={"initial_length": 4}).first_plan(JOB, {}).plan
    assert best != slow

    def chosen(current: ParallelPlan, *, has_news: bool, remaining_steps: int = 10**6) -> ParallelPlan | None:
        found = controller.settle(
            0,
            current=current,
            options=lambda n: {None: 0.0},
            outlook=Outlook(JOB, remaining_steps),
            has_news=has_news,
        )
        assert (found.frozen, found.reason) == (0, "")
        return None if found.choice is None else found.choice.plan

    assert chosen(slow, has_news=False) is None
    assert chosen(slow, has_news=True) == best
    assert chosen(slow, has_news=True, remaining_steps=0) is None, "the move takes longer than the rest of the run"
    assert chosen(best, has_news=True) is None


@pytest.mark.parametrize(
    ("cached", "options", "others"),
    [
        (None, {None: 0.0}, 0.0),
        (None, {None: 0.5, 4: 0.2}, 0.0),  # the pass takes less than the evaluations that it spares
        (None, {None: 0.2, 4: 0.5}, 0.3),
        (2, {None: 0.9, 2: 0.2, 4: 0.5}, 0.3),  # as stored now, evaluations compute two blocks less
    ],
)
def test_what_a_freeze_spends_is_what_it_adds_to_evaluations_and_passes(
    cached: int | None, options: dict[int | None, float], others: float
) -> None:
    controller = make_planner()
    current = replace(controller.first_plan(JOB, {}).plan, frozen=0 if cached is None else 2, cached=cached)
    outlook = Outlook(JOB, 10**9)

    def of(frozen: int) -> dict[int | None, float]:
        return options if frozen == 4 else {None: 7.0, 2: 7.0}

    choice = controller.next_plan(4, cached_options=options, current=current, outlook=outlook)
    assert choice is not None and choice.plan.cached == max(options, key=lambda at: at or 0)
    saved, spent = controller.gains(4, current=current, options=of, outlook=outlook)
    assert spent == pytest.approx(choice.transition_seconds + others)
    assert saved > 0


def test_a_tentative_freeze_saves_what_it_does_without_the_cache_until_it_is_judged() -> None:
    controller = make_planner()
    current = controller.first_plan(JOB, {}).plan
    outlook, options = Outlook(JOB, 1000), {None: 0.0, 4: 0.0}

    def saved(options: dict[int | None, float], *, tentative: float = 0.0) -> float:
        return controller.gains(
            4, current=current, options=lambda n: options, outlook=outlook, tentative_steps=tentative
        )[0]

    cached, uncached = saved(options), saved({None: 0.0})
    assert cached > uncached > 0
    assert saved(options, tentative=250) == pytest.approx(0.25 * uncached + 0.75 * cached)


@pytest.mark.parametrize(("beyond", "moves"), [(-0.01, True), (0.01, False)])
def test_a_gain_within_the_margin_moves_nothing_but_the_cut(beyond: float, moves: bool) -> None:
    controller = make_planner(pipe={"initial_length": 4})
    current = controller.first_plan(JOB, {}).plan

    def chosen(margin: float) -> Choice:
        outlook = Outlook(JOB, remaining_steps=10**9, margin=margin)
        found = controller.next_plan(2, cached_options={None: 0.0}, current=current, outlook=outlook)
        assert found is not None
        return found

    best, alike = chosen(0.0), chosen(1.0)
    gain = 1.0 - best.prediction.step_seconds / alike.prediction.step_seconds
    assert best.plan.pp != current.pp and 0.05 < gain < 0.95
    assert (alike.plan.pp, alike.plan.num_microbatches) == (current.pp, current.num_microbatches)
    assert alike.plan.frozen == 2 and alike.plan.boundaries != current.boundaries
    assert chosen(gain + beyond).plan == (best if moves else alike).plan


def test_a_kept_pipeline_keeps_a_unit_for_each_stage() -> None:
    controller = make_planner(pipe={"initial_length": 4}, dp={"enabled": False})
    plan = controller.first_plan(JOB, {}).plan
    assert plan.pp == 4 and controller.max_frozen(plan) == 3
    kept = "the pipeline that is kept needs a unit for each stage"
    assert settled(controller, 6, plan) == (3, kept, True)
    assert settled(controller, 6, plan_after(controller, 3, plan)) == (3, kept, False)


def test_a_prefix_that_fits_in_no_layout_freezes_as_far_as_one_does() -> None:
    """Where every rank holds the prefix; the unfrozen model is cut, so that four ranks hold it."""
    heavy = replace(JOB, parameter_bytes=tuple(10_000 for _ in JOB.parameter_bytes))
    limits = [
        (n, controller)
        for limit in range(60_000, 400_000, 10_000)
        if (controller := on_every_rank(make_planner(pipe={"memory_limit": limit, "initial_length": 4})))
        and (n := frozen_under(controller, heavy)) is not None
    ]
    most = [n for n, _ in limits]
    assert min(most) < 6 == max(most), "no limit stops freezing, or all do"
    for n, controller in limits:
        plan = controller.first_plan(heavy, {}).plan
        reason = "" if n == 6 else "no layout fits in memory"
        assert settled(controller, 6, plan, costs=heavy) == (n, reason, n > 0)


def test_a_prefix_that_fits_on_no_rank_stays_in_its_stages() -> None:
    """Nothing but memory speaks against freezing all: the limits are those of the test above."""
    heavy = replace(JOB, parameter_bytes=tuple(10_000 for _ in JOB.parameter_bytes))
    places = set()
    for limit in range(60_000, 400_000, 10_000):
        controller = make_planner(pipe={"memory_limit": limit, "initial_length": 4})
        if (most := frozen_under(controller, heavy)) is not None:
            assert most == 6
            plan = controller.first_plan(heavy, {}).plan
            choice = controller.next_plan(6, cached_options={None: 0.0}, current=plan, outlook=Outlook(heavy, 100))
            assert choice is not None
            places.add(choice.plan.prefix)
    assert places == {"in_place", "replicated"}


def on_every_rank(controller: Planner) -> Planner:
    """Takes no plan whose prefix is elsewhere."""
    return replace(controller, first=replace(controller.first, prefixes=("replicated",)))


def frozen_under(controller: Planner, costs: JobCosts) -> int | None:
    """The most blocks that some plan takes, asked one by one; None where the unfrozen model fits in none."""
    try:
        plan = controller.first_plan(costs, {}).plan
    except UserError:
        return None
    outlook = Outlook(costs, 100)
    taken = (
        n for n in range(6, 0, -1) if controller.next_plan(n, cached_options={None: 0.0}, current=plan, outlook=outlook)
    )
    return next(taken, 0)


def test_each_number_of_blocks_is_searched_once_for_steady_plans() -> None:
    heavy = replace(JOB, parameter_bytes=tuple(10_000 for _ in JOB.parameter_bytes))
    controller = next(
        controller
        for limit in range(60_000, 400_000, 10_000)
        if (controller := on_every_rank(make_planner(pipe={"memory_limit": limit, "initial_length": 4})))
        and frozen_under(controller, heavy) in range(1, 6)
    )
    most = frozen_under(controller, heavy)
    with mock.patch.object(Planner, "next_plan", autospec=True, side_effect=Planner.next_plan) as asked:
        steady = controller.steady_plans(heavy, has_cache=False)
    assert [call.args[1] for call in asked.call_args_list] == [6, 5, 4, 3, 2, 1]
    assert [found.plan.frozen for found in steady][-1] == most
