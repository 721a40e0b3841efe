"""A started run on the disk, an epoch at a time: killed at any moment it loses at most one.

    FOLDER/epoch-3.rank-0.pt ...    whole when all ranks' files are there; the two newest epochs are kept

Ranks keep what they hold, by its name in the model, and read what all kept: a pipeline that is cut elsewhere by new
measurements goes on.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.resnet101_accuracy.methods import Method
from pipetransformer.errors import writing
from pipetransformer.process.collectives import led_by
from pipetransformer.process.world import World

__all__ = ["Checkpoints", "Progress"]

_KEY, _MOMENTUM = "PIPETRANSFORMER_CACHE", "momentum_buffer"


@dataclass(frozen=True, slots=True)
class Progress:
    """Of a run: seconds that it took, and the mean loss of each epoch that it ended."""

    seconds: float = 0.0
    losses: tuple[float, ...] = ()


class Checkpoints:
    """Every method is collective.

    Args:
        model: whose tensors all methods train.
    """

    def __init__(self, folder: Path, world: World, *, model: nn.Module) -> None:
        with writing(folder, key=_KEY):
            folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._world = world
        self._model = model

    def save(self, progress: Progress, *, method: Method, optimizer: torch.optim.Optimizer) -> None:
        """Behind an epoch."""
        tensors = {name: tensor for part in method.parts() for name, tensor in part.state_dict().items()}
        momenta = {
            name: optimizer.state[parameter][_MOMENTUM]
            for part in method.parts()
            for name, parameter in part.named_parameters()
        }
        epoch, rank = len(progress.losses), self._world.rank
        path = self._path(epoch, rank)
        part_path = path.with_suffix(".part")
        kept = {"tensors": tensors, "momenta": momenta, "seconds": progress.seconds, "losses": list(progress.losses)}
        with writing(path, key=_KEY):
            with part_path.open("wb") as file:
                torch.save(kept, file)
                file.flush()
                os.fsync(file.fileno())
            part_path.replace(path)
        # The epoch before stays: another rank may not have written this one yet.
        self._path(epoch - 2, rank).unlink(missing_ok=True)

    def restore(self, *, optimizer: torch.optim.Optimizer) -> Progress:
        """Sets model and optimizer to the newest epoch that all ranks have kept; nothing where there is none."""
        epoch = led_by(0, partial(_newest, self._folder, num_ranks=self._world.size))
        if epoch == 0:
            return Progress()
        device = self._world.device
        files = [torch.load(self._path(epoch, r), map_location=device) for r in range(self._world.size)]
        tensors: dict[str, Tensor] = {name: t for file in files for name, t in file["tensors"].items()}
        momenta: dict[str, Tensor] = {name: t for file in files for name, t in file["momenta"].items()}
        self._model.load_state_dict(tensors)
        mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for name, parameter in self._model.named_parameters():
            if id(parameter) in mine:
                optimizer.state[parameter][_MOMENTUM] = momenta[name]
        return Progress(files[0]["seconds"], tuple(files[0]["losses"]))

    def _path(self, epoch: int, rank: int) -> Path:
        return self._folder / f"epoch-{epoch}.rank-{rank}.pt"


def _newest(folder: Path, *, num_ranks: int) -> int:
    """0 where no epoch is whole."""
    epochs = [int(path.name.partition(".")[0].removeprefix("epoch-")) for path in folder.glob("epoch-*.pt")]
    return max((epoch for epoch in epochs if epochs.count(epoch) == num_ranks), default=0)
