"""Sweeps: a configuration with several values of some keys, and the trials that they make."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError

from pipetransformer.config.schema import load_config
from pipetransformer.config.shipped import FOLDER
from pipetransformer.config.types import Count, Section, Text
from pipetransformer.config.words import explain
from pipetransformer.config.yaml_text import read_yaml
from pipetransformer.errors import UserError

_PREFIX = "sweep_"


class SweepFile(Section):
    """What a file of a sweep holds."""

    config: Text = Field(description="A training: a file, or the name of a shipped configuration.")
    combine: Literal["grid", "list", "random"] = Field(
        default="grid", description="All combinations; the n-th values together; or draws."
    )
    keys: dict[str, list[Any]] = Field(description="Keys, each with its values.")
    settings: list[Text] = Field(default_factory=list, description="Further settings, the same in all trials.")
    trials: Count | None = Field(default=None, description="Number of draws of `random`.")
    seed: int = Field(default=0, description="Seed of the draws.")


@dataclass(frozen=True, slots=True)
class Trial:
    """A training with some values: its name, the values by key, and the same as overrides."""

    name: str
    values: Mapping[str, Any]
    overrides: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sweep:
    """A sweep.

    Attributes:
        name: of its file.
        config: its configuration, as it is given to ``load_config``.
        combine: the way of combining.
        keys: the keys that differ, with their values.
        settings: settings of all trials.
        trials: the trials, in their order.
    """

    name: str
    config: str
    combine: str
    keys: Mapping[str, list[Any]]
    settings: tuple[str, ...]
    trials: tuple[Trial, ...] = field(default=())

    def as_wandb(self) -> str:
        """The definition that ``wandb sweep`` takes, whose agents run this project's command. Raises UserError for one
        that wandb cannot have."""
        if self.combine == "list":
            raise UserError(
                f"--wandb: {self.name} takes its values together (combine: list), which wandb's sweeps cannot"
            )
        task = load_config(self.config, self.settings).task
        image = task == "image_classification"
        metric = "Test/Acc" if image else "Evaluation F1" if task == "question_answering" else "Evaluation Accuracy"
        told = {
            "method": self.combine,
            "metric": {"name": metric, "goal": "maximize"},
            "parameters": {key: {"values": values} for key, values in self.keys.items()},
            "command": [
                "pipetransformer",
                "train",
                self.config,
                *self.settings,
                "log.wandb=online",
                "${args_no_hyphens}",
            ],
        }
        return yaml.safe_dump(told, sort_keys=False)


def load_sweep(given: str) -> Sweep:
    """Reads a file of a sweep, or a shipped one by its name, and checks each of its trials.

    Raises:
        UserError: for a mistake in it, or in a trial.
    """
    path = _found(given)
    values = read_yaml(path)
    try:
        found = SweepFile.model_validate(values)
    except ValidationError as error:
        raise UserError(f"{path}: {explain(error, schema=SweepFile, values=values)}") from None
    base = Path(found.config)
    beside = path.parent / base
    config = str(beside) if base.suffix in (".yaml", ".yml") and not base.exists() and beside.exists() else found.config
    if empty := next((key for key, each in found.keys.items() if not each), None) or (not found.keys and "keys"):
        raise UserError(f"{path}: keys: {empty} has no value; give some")
    if (found.combine == "random") != (found.trials is not None):
        raise UserError(f"{path}: trials: is the number of draws of combine random; give both or none")
    combined = list(dict.fromkeys(json.dumps(each) for each in _combined(found, path)))
    trials = tuple(_trial(number, json.loads(each)) for number, each in enumerate(combined))
    for trial in trials:
        load_config(config, [*found.settings, *trial.overrides])  # raises UserError
    name = path.stem.removeprefix(_PREFIX)
    return Sweep(name, config, found.combine, found.keys, tuple(found.settings), trials)


def _found(given: str) -> Path:
    path = Path(given)
    shipped = {file.stem.removeprefix(_PREFIX): file for file in sorted(FOLDER.glob(f"{_PREFIX}*.yaml"))}
    if path.is_file() or given not in shipped:
        if path.suffix not in (".yaml", ".yml") and not path.is_file():
            raise UserError(f"{given}: no such file, and no shipped sweep; shipped are {', '.join(shipped)}")
        return path
    return shipped[given]


def _combined(sweep: SweepFile, path: Path) -> Iterator[dict[str, Any]]:
    keys = list(sweep.keys)
    if sweep.combine == "grid":
        yield from (dict(zip(keys, each)) for each in itertools.product(*sweep.keys.values()))
    elif sweep.combine == "list":
        if len(lengths := {len(each) for each in sweep.keys.values()}) > 1:
            raise UserError(
                f"{path}: keys: have {', '.join(map(str, sorted(lengths)))} values; combine list needs as many of each"
            )
        yield from (dict(zip(keys, each)) for each in zip(*sweep.keys.values()))
    else:
        draws = random.Random(sweep.seed)
        for _ in range(sweep.trials or 0):
            yield {key: draws.choice(values) for key, values in sweep.keys.items()}


def _trial(number: int, values: Mapping[str, Any]) -> Trial:
    """Its name tells its number and, by a digest, its values: a sweep that is changed does not take up other trials."""
    overrides = tuple(f"{key}={json.dumps(value)}" for key, value in values.items())
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:6]
    return Trial(f"{number:03d}-{digest}", values, overrides)
