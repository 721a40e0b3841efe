"""The same epoch by timm's own training script (``--timm-train FILE``), as its users start it; nothing of it is here.

It reads folders of pictures (``write_class_folders``) and prints the seconds of each step.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from PIL import Image

from pipetransformer.config import Config
from pipetransformer.data import alone
from pipetransformer.data.images import ImagePreprocessing, load_image_data
from pipetransformer.data.info import describe
from pipetransformer.errors import UserError

_SECONDS = re.compile(r"Train: \d+ \[.*?Time: ([\d.]+)s,")


def write_class_folders(config: Config, folder: Path) -> None:
    """The job's pictures as ``folder/train/CLASS/*.png`` and ``folder/validation/CLASS/*.png``."""
    size, info = config.data.image_size, describe(config.data)
    assert size is not None
    as_they_are = ImagePreprocessing(size, 3, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), "bicubic")
    splits = load_image_data(config.data, info=info, preprocessing=as_they_are, seed=0, lead=alone)
    for split, name in (("train", "train"), ("eval", "validation")):
        data = splits[split]
        for sample, label in enumerate(data.labels.tolist()):
            pixels = data.inputs(np.array([sample]), length=size, epoch=0)["pixel_values"][0]
            to = folder / name / f"{label:03d}"
            to.mkdir(parents=True, exist_ok=True)
            Image.fromarray((255 * pixels.permute(1, 2, 0)).round().byte().numpy()).save(to / f"{sample}.png")


def arguments_of(config: Config, *, data: Path, ranks: int, output: Path, workers: int) -> list[str]:
    """Its command line for the same model, data, batch and recipe; one line of figures a step."""
    train, kwargs = config.train, config.model.kwargs
    given = [f"{key}={value}" for key, value in kwargs.items()]
    return [
        *("--data-dir", str(data), "--model", config.model.name, "--num-classes", "100"),
        *("--img-size", str(config.data.image_size), "--batch-size", str(-(-train.batch_size // ranks))),
        *(("--model-kwargs", *given) if given else ()),
        *("--epochs", str(train.epochs), "--opt", "adamw", "--opt-kwargs", "fused=True", "--lr", str(train.lr)),
        *("--weight-decay", str(train.weight_decay), "--sched", "cosine", "--warmup-epochs", "0"),
        *(("--clip-grad", str(train.max_grad_norm)) if train.max_grad_norm is not None else ()),
        *(
            "--smoothing",
            str(train.label_smoothing),
            "--workers",
            str(workers),
            "--device",
            "cpu",
            "--log-interval",
            "1",
        ),
        *("--no-prefetcher", "--no-aug", "--seed", str(train.seed), "--output", str(output)),
        *(("--amp", "--amp-dtype", "bfloat16") if train.precision == "bfloat16" else ()),
    ]


def steps_of(text: str) -> list[float]:
    """Seconds of each step, from the lines that it printed. Raises UserError where there are none."""
    seconds = [float(told) for told in _SECONDS.findall(text)]
    if not seconds:
        raise UserError("--timm-train: the script printed no line with the seconds of a step; give timm's train.py")
    return seconds
