"""The start of a job from Python: any module with a list of blocks, on datasets that are there; in a notebook, on one
rank, and under torchrun, on many.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipetransformer.config import Config, load_config
from pipetransformer.config.datasets import DATASETS, DatasetEntry
from pipetransformer.config.yaml_text import read_yaml
from pipetransformer.errors import UserError
from pipetransformer.inference.finished import Run

if TYPE_CHECKING:
    from torch import nn

    from pipetransformer.data import Dataset, Lead
    from pipetransformer.data.own_dataset import Collate, Metric
    from pipetransformer.engine import Loss
    from pipetransformer.process.world import World
    from pipetransformer.run.events import Event
    from pipetransformer.run.job import Job, JobMaker

Callback = Callable[["Event"], None]


def train(
    model: nn.Module,
    train_dataset: Any,
    eval_dataset: Any,
    config: str | Path | Mapping[str, Any] | None = None,
    *,
    blocks: str = "encoder.layer",
    loss: Loss | None = None,
    metrics: Mapping[str, Metric] | None = None,
    collate: Collate | None = None,
    callbacks: Sequence[Callback] = (),
    world: World | None = None,
) -> Run:
    """Trains ``model`` elastically and freeze-aware, and leaves the best weights in it.

    Args:
        model: its forward is a stem, a loop over the blocks, each of which takes what leaves the one before, and a
            head; without branches on tensors. It takes one tensor, or several by name; blocks take and give
            [rows, positions, width].
        train_dataset: map-style, of (input, label): a tensor, or a mapping of tensors by argument; a class or a number.
        eval_dataset: likewise.
        config: a YAML file, or settings by section, as ``{"train": {"epochs": 3, "lr": 1e-3}}``.
        blocks: attribute path of the list of blocks.
        loss: ``(outputs [rows, ...], labels [rows]) -> losses [rows]``; cross-entropy of classes, squared error of
            numbers, if not given.
        metrics: ``(classes or numbers [samples], labels [samples]) -> figure``, by name; the first decides which
            weights are the best; more is better. Accuracy, or Pearson's correlation, if not given.
        collate: makes a batch of a list of inputs.
        callbacks: called with every event of ``pipetransformer.run.events``, on every rank: steps, decisions,
            transitions, evaluations.
        world: ranks that have met already; None to meet here.

    Returns:
        The run.

    Raises:
        UserError: for a mistake in any of these.
    """
    from pipetransformer.process.world import close_world, init_world

    settings = _settings(config, name=type(model).__name__)
    if settings.run.private:
        os.umask(0o077)
    here = init_world(timeout_seconds=settings.run.timeout) if world is None else world
    given = {"train": train_dataset, "eval": eval_dataset}
    make = partial(_make_job, model=model, given=given, blocks=blocks, loss=loss, metrics=metrics, collate=collate)
    try:
        found = _trained(settings, here, make, callbacks)
        found.model(model, which="final" if settings.model.save == "final" else "best")
    except BaseException:
        if world is None and here.size == 1:  # with peers it might wait for them
            close_world()
        raise
    if world is None:
        close_world()
    return found


def _trained(settings: Config, world: World, make_job: JobMaker, callbacks: Sequence[Callback]) -> Run:
    """The run, when all ranks have ended it. Raises UserError for a folder that not all nodes see."""
    import torch.distributed as dist

    from pipetransformer.trainer import Trainer

    trainer = Trainer(settings, world, listeners=tuple(callbacks), make_job=make_job)
    folder = trainer.report.folder
    if not folder.is_shared:
        raise UserError(f"run.dir: not all nodes see {folder.path}, where the trained weights go; give a shared one")
    trainer.run()
    dist.barrier()  # rank 0 has written what all read
    found = Run(folder.path)
    if settings.log.report and world.rank == 0:
        with contextlib.suppress(Exception):  # no page may end a job that has trained well
            found.report()
    return found


def _settings(config: str | Path | Mapping[str, Any] | None, *, name: str) -> Config:
    """The configuration, with the sections that Python gives in place of YAML."""
    values = dict(config) if isinstance(config, Mapping) else {} if config is None else dict(read_yaml(config))
    usual: dict[str, dict[str, Any]] = {
        "train": {"epochs": 3, "batch_size": 32, "lr": 1e-3},
        "log": {"wandb": "disabled"},
        "freeze": {},
    }
    # What is cached is known by the modules' names and weights alone: a later run may have another forward.
    usual["cache"] = {"disk_budget": None}
    usual["model"] = {"pretrained": False}
    given: dict[str, dict[str, Any]] = {"model": {"name": name}, "data": {"name": "own"}}
    for section in ("data", *usual):
        values[section] = {**usual.get(section, {}), **(values.get(section) or {}), **given.get(section, {})}
    DATASETS.setdefault("own", DatasetEntry("own", "classes", "pipetransformer.data.reader:Reader"))
    return load_config({**values, "task": "own"})


def _make_job(
    config: Config,
    world: World,
    *,
    lead: Lead,
    model: nn.Module,
    given: Mapping[str, Any],
    blocks: str,
    loss: Loss | None,
    metrics: Mapping[str, Metric] | None,
    collate: Collate | None,
) -> Job:
    from pipetransformer.data.own_dataset import OwnDataset
    from pipetransformer.models.families import family_of
    from pipetransformer.models.own_model import OwnModel
    from pipetransformer.models.values import Values
    from pipetransformer.run.job import assemble_job

    built = OwnModel(copy.deepcopy(model), blocks=blocks)  # the job takes the weights out of its own
    values = Values(built.model, deferred=None, seed=config.train.seed)
    key = family_of(built.model, name=config.model.name).main_input
    datasets: dict[str, Dataset] = {
        split: OwnDataset(items, key=key, name=f"{split}_dataset", metrics=metrics, collate=collate)
        for split, items in given.items()
    }
    return assemble_job(config, world, built, values, datasets, loss=loss)
