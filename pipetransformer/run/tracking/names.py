"""The names of metrics on the dashboard: those of the original PipeTransformer, and additions of this project."""

from __future__ import annotations

from collections.abc import Mapping

_SHOWN = {"exact_match": "EM", "f1": "F1"}


def train_metrics(
    *,
    loss: float,
    accuracy: float,
    samples_per_second: float,
    synchronisations_per_second: float,
    forward_seconds: float,
    backward_seconds: float,
    frozen_blocks: int,
    pp: int,
    dp: int,
    num_microbatches: int,
    transition_seconds: float,
    cache_hit_rate: float | None,
) -> dict[str, float]:
    """The metrics of training by their names on the dashboard. All figures cover the steps since the last call.

    Args:
        loss: mean loss of the samples.
        accuracy: share of correct answers, 0 to 1.
        samples_per_second: samples of all ranks per second.
        synchronisations_per_second: sums of gradients over the replicas, per second.
        forward_seconds: seconds of the forward of one batch.
        backward_seconds: seconds of the backward of one batch.
        frozen_blocks: number of frozen blocks (n).
        pp: pipeline length.
        dp: number of pipeline replicas.
        num_microbatches: micro-batches per pipeline and step (M).
        transition_seconds: seconds of the last transition; 0 without one.
        cache_hit_rate: share of samples read from the cache, 0 to 1; None without a cache.
    """
    metrics: dict[str, float] = {
        "Train/Loss": loss,
        "Train/Acc": accuracy,
        "sample_throughput": samples_per_second,
        "comm_frequency": synchronisations_per_second,
        "forward_time_per_batch": forward_seconds,
        "backwards_time_per_batch": backward_seconds,
        "frozen_blocks": frozen_blocks,
        "pp": pp,
        "dp": dp,
        "microbatches": num_microbatches,
        "transition_seconds": transition_seconds,
    }
    return metrics if cache_hit_rate is None else {**metrics, "cache_hit_rate": cache_hit_rate}


def evaluation_metrics(task: str, metrics: Mapping[str, float], *, best: Mapping[str, float]) -> dict[str, float]:
    """The metrics of an evaluation by their names on the dashboard.

    Image tasks have the original's names, such as ``Test/Acc``. Text tasks have ``Evaluation Accuracy`` and
    ``Evaluation Accuracy (best)``; in the same way ``Evaluation EM`` or ``Evaluation Matthews correlation``.

    Args:
        metrics: metrics of this evaluation by name.
        best: metrics of the best evaluation so far, this one included.
    """
    if task == "image_classification":
        known = {"loss": "Test/Loss", "accuracy": "Test/Acc"}
        return {known.get(name, f"Test/{name}"): value for name, value in metrics.items()}
    named: dict[str, float] = {}
    for name, value in metrics.items():
        shown = f"Evaluation {_SHOWN.get(name, name[:1].upper() + name[1:].replace('_', ' '))}"
        named[shown] = value
        if name != "loss" and name in best:
            named[f"{shown} (best)"] = best[name]
    return named
