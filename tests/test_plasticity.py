"""Plasticity: similarities behind every block on any layout, the policy that reads their change, and runs that freeze,
thaw, freeze again and resume by it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from laws import NUM_BLOCKS, STATIC, Case, Weights, configuration, deviation, final_weights, plain_run, write_replay
from ranks import RankPool

from pipetransformer.config import FreezeConfig
from pipetransformer.engine.similarity import NUM_SAMPLES, similarity
from pipetransformer.freeze import AutoFreeze, Signals, build_policy
from pipetransformer.freeze.plasticity import plasticity
from pipetransformer.process.world import World
from pipetransformer.run import events
from pipetransformer.trainer import Trainer


def decided(frozen: int = 0, **signals: object) -> int:
    policy = build_policy(FreezeConfig(policy="plasticity", settled=0.5), num_blocks=4)
    assert policy is not None
    return policy.decide(Signals(3, frozen, **signals))  # type: ignore[arg-type]


def test_leading_blocks_that_have_settled_freeze() -> None:
    most = [4.0, 4.0, 4.0, 4.0]
    assert decided(plasticity=[1.0, 1.9, 2.0, 0.1], most_plastic=most) == 2, "2.0 is half of the most, not less"
    assert decided(1, plasticity=[9.0, 1.9, 3.0, 0.1], most_plastic=most) == 2, "what is frozen stays so"
    assert decided(1, plasticity=[None, None, 0.1, 0.1], most_plastic=most) == 1, "nothing is known of the second"
    assert decided(2) == 2


def test_all_thaw_when_the_learning_rate_has_fallen_to_a_tenth() -> None:
    assert decided(3, rate=0.05, rate_frozen=0.5) == 0 and decided(3, rate=0.051, rate_frozen=0.5) == 3
    assert decided(0, rate=0.05, rate_frozen=0.5, plasticity=[0.1] * 4, most_plastic=[4.0] * 4) == 4


def test_plasticity_is_the_change_of_what_ran_twice() -> None:
    before, now = [[0.0, 1.0], [0.0, 0.0], [0.5, 0.5]], [[0.3, 0.6], [1.0, 1.0], [0.0, 0.0]]
    assert plasticity(now, before) == [pytest.approx((0.09 + 0.16) / 2), None, None]


def test_the_controller_keeps_the_most_and_the_rate_of_the_freeze() -> None:
    rates = [1.0, 0.8, 0.6, 0.4, 0.05, 0.04]
    policy = build_policy(FreezeConfig(policy="plasticity", settled=0.5), num_blocks=1)
    assert policy is not None

    def fresh() -> AutoFreeze:
        return AutoFreeze(policy, every_steps=1, warmup_steps=0, num_blocks=1, rate=rates.__getitem__)

    controller, frozen, found = fresh(), 0, []
    for step, value in enumerate([0.0, 0.1, 0.5, 0.7, 0.7, 0.7]):
        if step == 4:  # a resumption in between
            state, controller = json.loads(json.dumps(controller.state_dict())), fresh()
            controller.load_state_dict(state)
        assert controller.needs_similarities(step)
        controller.compared([[0.9, value]])
        frozen = controller.decide(step, frozen=frozen).frozen
        found.append(frozen)
    old = {key: value for key, value in state.items() if key not in ("similarities", "most_plastic", "rate_frozen")}
    fresh().load_state_dict(old)  # of before there was such a policy
    # Changes 0.01, 0.16, 0.04: the last is a quarter of the most; the rate falls from 0.4 to 0.05, which is above a
    # tenth of it, and then to 0.04.
    assert found == [0, 0, 0, 1, 1, 0]


# ---- on ranks --------------------------------------------------------------------------------------------------------


def measured(world: World, folder: str, case: Case) -> tuple[np.ndarray, Weights | None]:
    """Similarities under the plan at the end of a run, and its weights."""
    replay = Path(folder) / f"replay-{world.rank}.jsonl"
    write_replay(replay, case.plans())
    place = (f"pipe.units={case.units}", f"run.replay={replay}", f"run.dir={folder}", "run.id=measured")
    trainer = Trainer(configuration("vit", [*case.overrides(""), *place]), world, timed=False)
    found: list[np.ndarray] = []

    def note(event: events.Event) -> None:
        if isinstance(event, events.TrainingEnds):
            found.append(trainer.engine.similarities())
            assert not trainer.engine.objective.num_samples, "they count as trained on"

    trainer.listeners = (*trainer.listeners, note)
    trainer.run()
    return found[0], final_weights(trainer)


MEASURED = {
    "replicas": Case("vit", 2, STATIC[1]),
    "pipeline in halves": Case("vit", 2, STATIC[2], units="half"),
    "prefix computed": Case("vit", 2, ((0, 0, 1), (9, 3, 2))),
    "prefix in its stages": Case("vit", 2, ((0, 0, 1), (9, 3, 2)), prefixes=("replicated", "in_place")),
    "prefix read": Case("vit", 2, ((0, 0, 1), (9, 3, 1)), cached=True),
}


@pytest.mark.parametrize("name", MEASURED)
def test_similarities_are_those_of_the_library_s_model(name: str, ranks: RankPool, tmp_path: Path) -> None:
    case = MEASURED[name]
    (found, weights), (theirs, _) = ranks.run(2, measured, str(tmp_path), case)
    assert np.array_equal(found, theirs) and weights is not None
    config = configuration("vit", Case("vit", 1, STATIC[1]).overrides(""))
    from pipetransformer.data import alone
    from pipetransformer.run.job import build_job

    job = build_job(config, World(0, 1, 0, 1, torch.device("cpu")), lead=alone)
    network, data = job.whole_model().double().eval(), job.datasets["train"]
    network.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
    outputs: list[np.ndarray] = []
    for block in network.blocks:  # type: ignore[union-attr]
        block.register_forward_hook(lambda _, __, leaving: outputs.append(leaving.detach().mean(1).numpy()))
    pictures = data.inputs(np.arange(NUM_SAMPLES), length=int(data.lengths[0]), epoch=0)["pixel_values"]
    network(pictures.double())
    for block, own in enumerate(outputs[: NUM_BLOCKS - 1]):  # of the last one, ours computes the head's row alone
        expected = 0 * similarity(own) if case.cached and block < 3 else similarity(own)
        assert np.abs(found[block] - expected).max() < 2e-6, block


@contextmanager
def scripted() -> Iterator[None]:
    """Three blocks settle at the third decision, two more behind the thaw; the learning rate falls at step 8."""
    depths = iter([0, 3, 3, 0, 5, 5, 5, 5, 5, 5])

    def told(now: object, before: object) -> list[float | None]:
        settled = next(depths)
        return [0.01 if block < settled else 1.0 for block in range(NUM_BLOCKS)]

    def rate(train: object, *, step: int, total_steps: int) -> float:
        return 0.001 if step < 8 else 0.00005

    with (
        mock.patch("pipetransformer.freeze.controller.plasticity", told),
        mock.patch("pipetransformer.freeze.controller.learning_rate", rate),
    ):
        yield


SETTINGS = ("freeze.policy=plasticity", "freeze.guard=false", "freeze.every=2 steps", "cache.disk_budget=null")


def live_run(world: World, folder: str) -> tuple[Weights | None, list[tuple[int, int]]]:
    plans: list[tuple[int, int]] = []

    def note(event: events.Event) -> None:
        if isinstance(event, events.Adopted) and (not plans or plans[-1][1] != event.plan.frozen):
            plans.append((event.step, event.plan.frozen))

    place = (f"run.dir={folder}", "run.id=live")
    with scripted():
        overrides = [*Case("vit", world.size, STATIC[1]).overrides(""), *SETTINGS, *place]
        trainer = Trainer(configuration("vit", overrides), world, listeners=[note])
        trainer.run()
    return final_weights(trainer), plans


def test_a_run_that_freezes_thaws_and_freezes_deeper_is_the_plain_loop(ranks: RankPool, tmp_path: Path) -> None:
    (weights, plans), (_, theirs) = ranks.run(2, live_run, str(tmp_path))
    assert plans == theirs and plans == [(0, 0), (4, 3), (8, 0), (10, 5)]
    expected, _ = plain_run("vit", tuple(plans[1:]), tuple(Case("vit", 2, STATIC[1]).overrides("")))
    assert weights is not None and deviation(weights, expected) < 1e-10
    told = [json.loads(line) for line in (tmp_path / "live" / "events.jsonl").read_text().splitlines()]
    decisions = [event for event in told if event["event"] == "freeze_decision"]
    assert decisions[0]["plasticity"] is None and decisions[2]["plasticity"] == [0.01] * 3 + [1.0] * 3
