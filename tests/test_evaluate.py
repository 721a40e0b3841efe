"""Outputs reach the metrics in the job's precision; of equal evaluations the best is the one of the smaller loss."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ranks import RankPool
from torch import Tensor

from pipetransformer.engine.evaluate import evaluate
from pipetransformer.engine.executor import StepInput
from pipetransformer.engine.objective import Objective
from pipetransformer.process.world import World
from pipetransformer.run.totals import Totals

CPU = torch.device("cpu")


def _outputs(world: World, dtype: torch.dtype) -> np.ndarray:
    """What the metrics see of a model that answers ``[1, 1 + 1e-12]``."""
    labels = torch.tensor([1])
    batch = StepInput(
        hidden=None, inputs={}, ids=np.array([0]), labels=labels, length=1, rows=1, global_count=1, num_real=1,
        enters=0, is_padded=False,
    )  # fmt: skip
    objective = Objective("classes", label_smoothing=0.0, device=CPU)

    def answer(batch: StepInput) -> torch.Tensor:
        outputs = torch.tensor([[1.0, 1.0 + 1e-12]], dtype=dtype)
        objective(outputs, batch.labels)
        return outputs

    class Data:
        def __len__(self) -> int:
            return 1

        def predict(self, ids: np.ndarray, outputs: np.ndarray) -> np.ndarray:
            return outputs

        def measure(self, predictions: np.ndarray) -> dict[str, float]:
            self.seen = predictions
            return {}

    data, feed = Data(), SimpleNamespace(batches=lambda batches, epoch: [batch], enter=lambda batch: None)
    told: Any = (SimpleNamespace(evaluate=answer), feed, data)
    evaluate(*told, objective, batches=[])
    return data.seen[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_metrics_see_the_precision_of_the_job(ranks: RankPool, dtype: torch.dtype) -> None:
    (outputs,) = ranks.run(1, _outputs, dtype)
    assert outputs.dtype == (np.float64 if dtype == torch.float64 else np.float32)
    assert (outputs[1] > outputs[0]) == (dtype == torch.float64)


@pytest.mark.parametrize(
    ("evaluations", "best"),
    [
        ([(0.5, 2.0), (0.7, 3.0), (0.6, 1.0)], 1),
        ([(0.5, 2.0), (0.5, 1.0), (0.5, 3.0)], 1),  # a tie: the smaller loss
        ([(0.5, 2.0), (0.5, 2.0)], 0),  # no better: the earlier
        ([(float("nan"), 2.0), (0.1, 3.0), (float("nan"), 1.0)], 1),  # a correlation of constant answers is no number
    ],
)
def test_the_best_evaluation(evaluations: list[tuple[float, float]], best: int) -> None:
    totals, told = Totals(), [{"score": score, "loss": loss} for score, loss in evaluations]
    for metrics in told:
        totals.add_evaluation(metrics, by="score")
    assert totals.best_metrics is told[best] and totals.metrics is told[-1]


def test_a_short_batch_counts_by_its_share() -> None:
    """Four samples a step: the gradient of a batch of one is a quarter of its own."""
    objective = Objective("scores", label_smoothing=0.0, device=CPU)
    outputs = torch.tensor([[3.0]], requires_grad=True)
    objective.begin(step=0, batch_size=4)
    objective(outputs, torch.tensor([1.0])).backward()
    assert outputs.grad is not None and outputs.grad.item() == 2 * (3.0 - 1.0) / 4
    assert (objective.loss_sum.item(), objective.num_samples.item()) == (4.0, 1)  # the figures are of samples


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_ones_own_loss_of_a_sample_has_the_type_that_it_trains_in(dtype: torch.dtype) -> None:
    """Its own tensors may have no other."""
    weights = torch.tensor([1.0, 2.0], dtype=torch.float64 if dtype == torch.float64 else torch.float32)

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(outputs, labels, weight=weights, reduction="none")

    objective = Objective("classes", label_smoothing=0.0, device=CPU, of_each=loss)
    found = objective.of_samples(torch.zeros(2, 2, dtype=dtype), torch.tensor([0, 1]))
    assert found.dtype == torch.float64 and found.tolist() == pytest.approx([math.log(2), 2 * math.log(2)])
