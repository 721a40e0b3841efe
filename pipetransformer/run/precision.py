"""``train.precision: auto``: bfloat16 where devices have instructions for it and a timing confirms it, else float32.

Decided once for all ranks, before anything is measured, and kept: a resumed or replayed run takes what it was trained
with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Literal

import numpy as np
import torch
import yaml
from torch import Tensor

from pipetransformer.adapter import WideAttention
from pipetransformer.config import Config, load_config
from pipetransformer.data import Dataset
from pipetransformer.errors import UserError
from pipetransformer.models import Chain
from pipetransformer.process.collectives import led_by, slowest, values_of_ranks
from pipetransformer.process.device import has_bfloat16, synchronize
from pipetransformer.process.world import World
from pipetransformer.run.tracking import read_events
from pipetransformer.run.wide_attention import most_positions

_MOST_ROWS = 16  # a pass keeps the activations of the whole model
_LONGEST_PASS = 0.25  # seconds of a timed pass; fewer samples where all of a rank's share would take longer
_ROUNDS_SECONDS, _MOST_ROUNDS = 1.0, 5
_WORTH = 0.9  # of float32's time: less gain is not worth other numbers


@dataclass(frozen=True, slots=True)
class Precision:
    """The precision of a job.

    Attributes:
        name: as in ``train.precision``, never ``auto``.
        reason: the evidence in words; empty where the precision was given.
        seconds: seconds that the timing took.
        wide_attention: as in ``train.wide_attention``, never ``auto``.
        attention_reason: the evidence for that in words; empty likewise.
    """

    name: Literal["float32", "bfloat16", "float16", "float64"]
    reason: str = ""
    seconds: float = 0.0
    wide_attention: int = 0
    attention_reason: str = ""

    def lines(self) -> Iterator[str]:
        """What was ``auto``, for the user."""
        if self.reason:
            yield f"train.precision: auto is {self.name} ({self.reason})"
        if self.attention_reason:
            yield f"train.wide_attention: auto is {self.wide_attention} ({self.attention_reason})"


def with_past_choices(config: Config) -> Config:
    """Collective. What is ``auto`` in ``train.precision``, ``train.wide_attention``, ``cache.views`` and
    ``freeze.guard_samples`` becomes what the run that is resumed or replayed was trained with, if there is one, and
    ``freeze.stem`` what was replayed: a replay's plans hold it. (A checkpoint refuses another stem.)
    """
    if not (config.run.resume or config.run.replay):
        return config
    found = led_by(0, lambda: _past(config))
    given = {
        "train.precision": config.train.precision,
        "train.wide_attention": config.train.wide_attention,
        "cache.views": config.cache.views,
        "freeze.guard_samples": config.freeze.guard_samples,
    }
    found = {key: value for key, value in found.items() if given.get(key, "auto") == "auto"}
    return config.with_overrides(found) if found else config


def _past(config: Config) -> dict[str, object]:
    """Values by key of the configuration."""
    run = config.run
    if run.resume and run.id is not None:
        folder = Path(run.dir).expanduser() / run.id
        kept = folder / "config.yaml"
        if not kept.is_file():
            return {}
        try:
            past, written = load_config(kept, is_past=True), yaml.safe_load(kept.read_text(encoding="utf-8"))
        except UserError:  # damaged
            return {key: value for key, value in _told(folder / "events.jsonl").items() if key != "freeze.stem"}
        # There were none before these were keys.
        views = past.cache.views if "views" in (written.get("cache") or {}) else None
        wide = past.train.wide_attention if "wide_attention" in written["train"] else 0
        choices = {"train.precision": past.train.precision, "train.wide_attention": wide, "cache.views": views}
        return {**choices, "freeze.guard_samples": past.freeze.guard_samples}
    return {} if run.replay is None else _told(Path(run.replay))


def _told(events: Path) -> dict[str, object]:
    """The same, by what a run has recorded."""
    found: dict[str, object] = {}
    with suppress(UserError):  # of a replay, it is told when the plans are read
        for event in read_events(events):
            if event["event"] == "run":
                found["train.precision"] = event.get("precision", "float32")
                found["train.wide_attention"] = event.get("wide_attention", 0)
                found["cache.views"] = event.get("views")
            elif event["event"] == "plan" and isinstance(event.get("plan"), dict):
                found["freeze.stem"] = event["plan"].get("stem_frozen", False)
    return found


def settle(chain: Chain, dataset: Dataset, config: Config, *, world: World) -> Precision:
    """Collective. The precision of a job and of its attention, the same on every rank; ``chain`` computes in them from
    now on.

    Gradients are deleted, weights and random numbers left as they were.

    Args:
        chain: in float32 where the precision is ``auto``.
        dataset: the training data.
    """
    given, began, told = config.train.precision, perf_counter(), ""
    name: Literal["float32", "bfloat16", "float16", "float64"] = "bfloat16" if given == "auto" else given
    rows = -(-config.train.batch_size // world.size)
    if given == "auto":
        has = has_bfloat16(world.device)
        if not (has if world.size == 1 else all(values_of_ranks(has))):
            return Precision("float32", "no instructions for bfloat16")
        told = "there are instructions for it, and nothing is timed"
    chain.autocasts = name in ("bfloat16", "float16")
    wide, reason = _wide_attention(chain, dataset, config, rows=rows, agree=slowest if world.size > 1 else float)
    chain.attention = WideAttention(wide)
    if given == "auto" and config.pipe.measure:
        ratio = _ratio(chain, dataset, rows=rows)
        told = f"forward and backward in bfloat16 take {ratio:.2f} of their time in float32"
        chain.autocasts = ratio < _WORTH
        if not chain.autocasts:
            name, wide, reason = "float32", 0, ""
    return Precision(name, told, perf_counter() - began, wide, reason)


def _wide_attention(
    chain: Chain, dataset: Dataset, config: Config, *, rows: int, agree: Callable[[float], float]
) -> tuple[int, str]:
    """Collective. ``train.wide_attention`` as a number, and its reason where it was timed."""
    given = config.train.wide_attention
    if given != "auto":
        return given, ""
    if not chain.autocasts or chain.device.type != "cpu" or not config.pipe.measure:
        return 0, ""
    return most_positions(chain, dataset, rows=rows, agree=agree)


def _ratio(chain: Chain, dataset: Dataset, *, rows: int) -> float:
    """Collective. Seconds of forward and backward in bfloat16 over those in float32, on the slowest rank."""
    lengths, counts = np.unique(dataset.lengths, return_counts=True)
    length = int(lengths[np.argmax(counts * lengths)])
    ids = np.flatnonzero(dataset.lengths == length)[:rows]
    chain.train()
    devices = [chain.device] if chain.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), chain.with_stand_ins():
        one = _inputs(chain, dataset, ids[:1], length=length)
        _seconds(chain, one, autocasts=(False,))  # warm-up
        (of_one,) = _seconds(chain, one, autocasts=(False,))
        num_rows = min(rows, max(1, int(_LONGEST_PASS / slowest(of_one))), _MOST_ROWS)
        inputs = _inputs(chain, dataset, np.resize(ids, num_rows), length=length)
        warm = sum(map(slowest, _seconds(chain, inputs, autocasts=(False, True))))
        num_rounds = min(_MOST_ROUNDS, max(2, int(_ROUNDS_SECONDS / warm)))
        plain, half = map(slowest, _seconds(chain, inputs, autocasts=(False, True), num_rounds=num_rounds))
    return half / plain


def _inputs(chain: Chain, dataset: Dataset, ids: np.ndarray, *, length: int) -> Mapping[str, Tensor]:
    raw = dataset.inputs(ids, length=length, epoch=0)
    return {key: value.to(chain.device) for key, value in raw.items()}


def _seconds(
    chain: Chain, inputs: Mapping[str, Tensor], *, autocasts: Sequence[bool], num_rounds: int = 1
) -> list[float]:
    """Median seconds of forward and backward for each of ``autocasts``, which take turns.

    Unit by unit: no more than the weights, activations and gradients of one are held.
    """
    side, hidden = {key: inputs[key] for key in chain.input_keys}, inputs[chain.family.main_input]
    seconds = np.zeros((num_rounds, len(autocasts)))
    for unit in range(chain.num_units):
        with chain.lent([unit], awake=True):
            parameters = list(chain.trained_parameters([unit]).values())
            for each in np.ndindex(seconds.shape):
                chain.autocasts = autocasts[each[1]]
                start = perf_counter()
                source = hidden.detach().requires_grad_(hidden.is_floating_point())
                leaving = chain.run(range(unit, unit + 1), source, side)
                if leaving.requires_grad:  # not of a stem that does not train
                    torch.autograd.backward(leaving, torch.ones_like(leaving))
                for parameter in parameters:
                    parameter.grad = None
                synchronize(chain.device)
                seconds[each] += perf_counter() - start
        hidden = leaving
    return [median(of_one) for of_one in seconds.T.tolist()]
