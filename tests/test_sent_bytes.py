"""The bytes of gradients in a run's events are those that its reducers sent, and freezing makes them fewer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from laws import NUM_BLOCKS, Case, Weights, elastic_run, is_frozen
from ranks import RankPool

from pipetransformer.process.world import World
from pipetransformer.run.tracking import read_events

# A single pipeline, then replicas without one, of fewer blocks, then of the head alone; replicas of pipelines.
RUNS = {
    "2 ranks": Case("vit", 2, ((0, 0, 2), (5, 2, 1), (10, NUM_BLOCKS, 1)), precision="float32"),
    "4 ranks": Case("vit", 4, ((0, 0, 2), (10, 4, 2))),
}


def trained(world: World, case: Case, folder: str) -> Weights | None:
    return elastic_run(world, case, "", folder)[0]


@pytest.mark.parametrize("name", RUNS)
def test_each_step_sends_the_gradient_of_what_is_trained(name: str, ranks: RankPool, tmp_path: Path) -> None:
    case = RUNS[name]
    weights = ranks.run(case.world_size, trained, case, str(tmp_path))[0]
    size = 4 if case.precision == "float32" else 8
    plans = case.plans()
    steps = [event for event in read_events(tmp_path / "elastic" / "events.jsonl") if event["event"] == "steps"]
    assert {event["step"] - event["num_steps"] for event in steps} >= set(plans)
    for event in steps:
        plan = plans[max(step for step in plans if step < event["step"])]
        active = {name: value.size * size for name, value in weights.items() if not is_frozen(name, plan.frozen)}
        by_rank = np.array(event["sent_bytes_by_rank"]) / event["num_steps"]
        expected = sum(active.values()) if plan.dp > 1 else 0
        # The stages of a pipeline share the model, and its replicas send the same.
        assert by_rank.reshape(plan.dp, plan.pp).sum(axis=1).tolist() == [expected] * plan.dp, plan
        assert not expected or by_rank.min() > 0
