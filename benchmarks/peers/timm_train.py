"""The same epoch by timm's own training script (``--timm-train FILE``), as its users start it; nothing of it is here.

Its lines tell seconds a step and samples a second, averaged since the epoch began.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from pipetransformer.config import Config

_LINE = re.compile(r"Train: \d+ \[ *(\d+)/.*?Time: [\d.]+s, +[\d.]+/s +\(([\d.]+)s, +([\d.]+)/s\)")


def arguments_of(config: Config, *, data: Path, ranks: int, output: Path) -> list[str]:
    """Its command line for the same model, data, batch and recipe; one line of figures a step."""
    train, kwargs = config.train, config.model.kwargs
    given = [f"{key}={value}" for key, value in kwargs.items()]
    return [
        *("--data-dir", str(data), "--model", config.model.name, "--num-classes", "100"),
        *("--img-size", str(config.data.image_size), "--batch-size", str(-(-train.batch_size // ranks))),
        *(("--model-kwargs", *given) if given else ()),
        *("--epochs", str(train.epochs), "--opt", "adamw", "--lr", str(train.lr)),
        *("--weight-decay", str(train.weight_decay), "--sched", "cosine", "--warmup-epochs", "0"),
        *("--smoothing", str(train.label_smoothing), "--workers", "0", "--device", "cpu", "--log-interval", "1"),
        *("--no-aug", "--seed", str(train.seed), "--output", str(output)),
        *(("--amp", "--amp-dtype", "bfloat16") if train.precision == "bfloat16" else ()),
    ]


def figures_of(text: str) -> Mapping[str, float]:
    """Samples a second over the epoch, from what it printed. Raises ValueError where it printed no such line."""
    lines = _LINE.findall(text)
    if not lines:
        raise ValueError("no line of its figures")
    return {"samples_per_s": float(lines[-1][2]), "steps": float(lines[-1][0]) + 1}
