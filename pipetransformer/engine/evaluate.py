"""Evaluation: every sample once, over all ranks, under the present plan. The dataset turns outputs into metrics."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from pipetransformer.data import Batch, Dataset
from pipetransformer.engine.executor import Executor
from pipetransformer.engine.feed import Feed
from pipetransformer.engine.objective import Objective
from pipetransformer.process.collectives import first_of_ranks, values_of_ranks


class NotFinite(Exception):
    """An evaluation loss that is not finite. It is raised on every rank.

    Attributes:
        rank: the first rank with such a loss.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.rank = rank


def evaluate(
    executor: Executor, feed: Feed, dataset: Dataset, objective: Objective, *, batches: Sequence[Batch]
) -> dict[str, float]:
    """Collective. The metrics of ``dataset`` by name, with ``loss``, the same on every rank.

    The model must be in eval mode. The predictions for all samples are gathered on rank 0, because most metrics are not
    sums over samples.

    Args:
        feed: the inputs of this rank.
        batches: every sample of ``dataset`` once.

    Raises:
        NotFinite: if the loss is not finite.
    """
    objective.clear()
    mine: list[tuple[np.ndarray, np.ndarray]] = []
    with torch.no_grad():
        for batch in feed.batches(batches, epoch=0):
            objective.begin(step=-1)
            feed.enter(batch)
            outputs = executor.evaluate(batch)
            if outputs is not None and batch.num_real:
                outputs = outputs if outputs.dtype == torch.float64 else outputs.float()  # numpy has no bfloat16
                ids = batch.ids[: batch.num_real]
                mine.append((ids, dataset.predict(ids, outputs[: batch.num_real].cpu().numpy())))
    figures = torch.stack([objective.loss_sum, objective.num_samples.double()])
    objective.clear()
    if (found := first_of_ranks(None if figures.isfinite().all() else 0)) is not None:
        raise NotFinite(found[1])
    dist.all_reduce(figures)
    loss_sum, count = figures.tolist()
    assert count == len(dataset), f"{count} evaluation samples counted of {len(dataset)}"
    is_first = dist.get_rank() == 0
    parts: list[list[tuple[np.ndarray, np.ndarray]]] = [mine] * dist.get_world_size()
    if len(parts) > 1:  # a single process starts no threads of gloo, see ``adapter.save_tensors``
        dist.gather_object(mine, parts if is_first else None)
    answer: list[dict[str, float]] = [{}]
    if is_first:
        ids, predictions = (np.concatenate(column) for column in zip(*(pair for part in parts for pair in part)))
        answer = [{**dataset.measure(predictions[np.argsort(ids)]), "loss": loss_sum / count}]
    dist.broadcast_object_list(answer, src=0)
    return answer[0]


def sample_losses(
    executor: Executor, feed: Feed, dataset: Dataset, objective: Objective, *, batches: Sequence[Batch]
) -> np.ndarray:
    """Collective. The loss of every sample of ``dataset``, float64 [samples], the same on every rank.

    The model must be in eval mode. Other arguments are those of ``evaluate``.
    """
    mine: list[tuple[np.ndarray, np.ndarray]] = []
    with torch.no_grad():
        for batch in feed.batches(batches, epoch=0):
            objective.begin(step=-1)
            feed.enter(batch)
            outputs, real = executor.evaluate(batch), batch.num_real
            if outputs is not None and real:
                losses = objective.of_samples(outputs[:real], batch.labels[:real])
                mine.append((batch.ids[:real], losses.cpu().numpy()))
    objective.clear()
    found = np.full(len(dataset), np.nan)
    for part in values_of_ranks(mine):
        for ids, of_ids in part:
            found[ids] = of_ids
    return found
