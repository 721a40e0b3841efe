"""The same epoch by timm's own training script (``--timm-train FILE``), as its users start it; nothing of it is here.

It reads folders of pictures (``write_class_folders``), prints the mean seconds of an epoch's steps and writes a line of
metrics an epoch.
"""

from __future__ import annotations

import csv
import re
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import timm
import torch
from PIL import Image

from pipetransformer.config import Config
from pipetransformer.data import alone
from pipetransformer.data.images import ImagePreprocessing, load_image_data
from pipetransformer.data.info import describe
from pipetransformer.errors import UserError

_ROUNDS = 5
# Of an epoch's last step: its number, how many there are, and the mean seconds of all.
_MEAN = re.compile(r"Train: (\d+) \[ *(\d+)/(\d+).*?Time: .*?\(([\d.]+)s,")


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


def arguments_of(
    config: Config, *, data: Path, ranks: int, output: Path, workers: int, by_step: bool = False
) -> list[str]:
    """Its command line for the same model, data, batch and recipe; a line of figures an epoch.

    A saved model is loaded as ours is: by timm from its folder, with a new head where its own has other classes.

    Args:
        by_step: the learning rate falls step by step, as ours does; false: epoch by epoch, the script's default.
    """
    train, kwargs, name = config.train, config.model.kwargs, config.model.name
    given = [f"{key}={value}" for key, value in {**kwargs, "img_size": config.data.image_size}.items()]
    return [
        *("--data-dir", str(data), "--model", f"local-dir:{name}" if Path(name).is_dir() else name),
        *("--num-classes", str(len(describe(config.data).label_names))),
        *(("--pretrained",) if config.model.pretrained else ()),
        *("--img-size", str(config.data.image_size), "--batch-size", str(-(-train.batch_size // ranks))),
        *("--model-kwargs", *given),
        *("--epochs", str(train.epochs), "--opt", "adamw", "--opt-kwargs", "fused=True", "--lr", str(train.lr)),
        *("--weight-decay", str(train.weight_decay), "--sched", "cosine", "--warmup-epochs", "0"),
        *(("--sched-on-updates",) if by_step else ()),
        *(("--clip-grad", str(train.max_grad_norm)) if train.max_grad_norm is not None else ()),
        *(
            "--smoothing",
            str(train.label_smoothing),
            "--workers",
            str(workers),
            "--device",
            "cpu",
            "--log-interval",
            "1000",
        ),
        *("--no-prefetcher", "--no-aug", "--seed", str(train.seed), "--output", str(output)),
        *(("--amp", "--amp-dtype", "bfloat16") if train.precision == "bfloat16" else ()),
    ]


def faster_attention(config: Config, *, ranks: int) -> dict[str, str]:
    """The variable of its environment for the faster of timm's two ways of attention, torch's fused kernel (its own
    choice) or single products: by forward and backward of its model on one thread.
    """
    train, name = config.train, config.model.name
    given = {**config.model.kwargs, "img_size": config.data.image_size}
    rows, size, threads = -(-train.batch_size // ranks), config.data.image_size, torch.get_num_threads()
    assert size is not None
    pictures = torch.zeros(rows, 3, size, size)
    seconds: dict[str, list[float]] = {"1": [], "0": []}
    torch.set_num_threads(1)
    try:
        models = {}
        for way in seconds:
            timm.layers.set_fused_attn(way == "1")
            models[way] = timm.create_model(f"local-dir:{name}" if Path(name).is_dir() else name, **given).train()
        for _ in range(_ROUNDS + 1):  # the first is not counted
            for way, model in models.items():
                begun = perf_counter()
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=train.precision == "bfloat16"):
                    found = model(pictures)
                found.float().square().mean().backward()
                seconds[way].append(perf_counter() - begun)
    finally:
        timm.layers.set_fused_attn(True)
        torch.set_num_threads(threads)
    return {"TIMM_FUSED_ATTN": min(seconds, key=lambda way: median(seconds[way][1:]))}


def step_seconds(text: str, *, epoch: int) -> float:
    """Mean seconds of a step of an epoch, from the line that it printed behind the last. Raises UserError where there
    is none."""
    for told, step, number, seconds in _MEAN.findall(text):
        if int(told) == epoch and int(step) + 1 == int(number):
            return float(seconds)
    raise UserError("--timm-train: the script printed no line with the seconds of a step; give timm's train.py")


def curve_of(text: str, *, output: Path) -> tuple[tuple[float, float], ...]:
    """(Seconds of all steps so far, accuracy) behind each epoch, from what the script printed and the ``summary.csv``
    that it wrote below ``output``. Raises UserError where a figure is missing."""
    last = (found for found in _MEAN.findall(text) if int(found[1]) + 1 == int(found[2]))
    seconds = {int(epoch): int(number) * float(mean) for epoch, _, number, mean in last}
    curve: list[tuple[float, float]] = []
    try:
        (path,) = output.glob("*/summary.csv")
        for row in csv.DictReader(path.read_text().splitlines()):
            before = curve[-1][0] if curve else 0.0
            curve.append((before + seconds[int(row["epoch"])], float(row["eval_top1"]) / 100))
        assert curve
    except (OSError, KeyError, ValueError, TypeError, AssertionError) as error:
        raise UserError(
            "--timm-train: the script left no line of seconds and accuracy for each epoch; give timm's train.py"
        ) from error
    return tuple(curve)
