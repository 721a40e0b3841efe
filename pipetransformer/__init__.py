"""PipeTransformer-next: elastic, freeze-aware training (the idea of arXiv 2102.03161).

run = pipetransformer.train(model, train_dataset, eval_dataset, {"train": {"epochs": 3}}, blocks="encoder.layer")
run = pipetransformer.Run("runs/1000")
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["Run", "events", "train"]
_PLACES = {"Run": "inference.finished", "events": "run.events", "train": "launch.python"}


def __getattr__(name: str) -> Any:
    """Imports when it is asked for: torch takes seconds, and most of the package does without these."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = import_module(f"{__name__}.{_PLACES[name]}")
    return found if name == "events" else getattr(found, name)
