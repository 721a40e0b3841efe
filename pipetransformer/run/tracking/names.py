"""The names of an evaluation's metrics on the dashboard: those of the original PipeTransformer, and additions."""

from __future__ import annotations

from collections.abc import Mapping

from pipetransformer.config import TrainConfig
from pipetransformer.config.learning_rate import learning_rate

_SHOWN = {"exact_match": "EM", "f1": "F1"}


def position(train: TrainConfig, *, step: int, total_steps: int, train_seconds: float) -> dict[str, float]:
    """Where a run is behind ``step`` steps: the dashboard's x axes beside steps, and the last step's learning rate."""
    lr = learning_rate(train, step=max(0, step - 1), total_steps=total_steps)
    epoch = {} if train.max_steps is not None else {"epoch": step / max(1, total_steps) * train.epochs}
    return {"lr": lr, **epoch, "train_seconds": train_seconds}


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
