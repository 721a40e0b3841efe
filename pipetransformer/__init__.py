"""PipeTransformer-next: elastic, freeze-aware training (the idea of arXiv 2102.03161).

run = pipetransformer.train(model, train_dataset, eval_dataset, {"train": {"epochs": 3}}, blocks="encoder.layer")
run = pipetransformer.Run("runs/1000")
"""

from __future__ import annotations

from typing import Any

__all__ = ["Run", "events", "train"]


def __getattr__(name: str) -> Any:
    """Imports when it is asked for: torch takes seconds, and most of the package does without these."""
    if name == "train":
        from pipetransformer.launch.python import train

        return train
    if name == "Run":
        from pipetransformer.inference.finished import Run

        return Run
    if name == "events":
        from pipetransformer.run import events

        return events
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
