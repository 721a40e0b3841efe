"""The names of metrics on a dashboard: those of the original PipeTransformer, and what this project adds."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["evaluation_metrics", "train_metrics"]

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
    """What is logged while training, each figure over the steps since the last time.

    ``forward_seconds`` and ``backward_seconds`` are those of one batch; ``synchronisations_per_second`` counts
    reductions of the gradient; ``transition_seconds`` is what transitions took; ``cache_hit_rate`` (0..1) is None
    without a cache.
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
    """What is logged after an evaluation; ``best`` includes this one.

    Images have the original's ``Test/Acc``; texts ``Evaluation Accuracy`` and ``Evaluation Accuracy (best)``, and
    likewise ``Evaluation EM``, ``Evaluation Matthews correlation``.
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
