"""The names of metrics on a dashboard: those of the original PipeTransformer, and what this project adds."""

from __future__ import annotations

__all__ = ["evaluation_metrics", "train_metrics"]


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


def evaluation_metrics(task: str, *, loss: float, accuracy: float, best_accuracy: float) -> dict[str, float]:
    """What is logged after an evaluation; ``best_accuracy`` includes this one.

    Raises ValueError for an unknown task.
    """
    if task == "image_classification":
        return {"Test/Loss": loss, "Test/Acc": accuracy}
    if task == "text_classification":
        return {
            "Evaluation Loss": loss,
            "Evaluation Accuracy": accuracy,
            "Evaluation Accuracy (best)": best_accuracy,
        }
    raise ValueError(f"no metric names for task {task!r}")
