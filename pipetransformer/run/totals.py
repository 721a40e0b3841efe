"""The sums of a run. Checkpoints hold them, so that the summary of a resumed run covers the whole run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from pydantic import BeforeValidator

from pipetransformer.cache import Advance
from pipetransformer.config import Config
from pipetransformer.run.tracking import CacheBytes, CacheUse, Summary, Transition


def _by_tier(found: object) -> object:
    """Older checkpoints have the bytes of the host alone."""
    return {"host": found} if isinstance(found, int) else found


@dataclass(slots=True)
class Totals:
    """Seconds by kind, figures by epoch, and every transition.

    Attributes:
        wall_s: seconds since the start of the run, without the time between a stop and its resumption.
        setup_s: seconds before the first step.
        train_s: seconds of steps, transitions and advance passes.
        eval_s: seconds of evaluations, advance passes over their samples included.
        transition_s: seconds of transitions and decisions.
        cache_advance_s: seconds of advance passes over the samples that training needs.
        save_s: seconds of checkpoints.
        floor_s: the compute floor.
        epoch_train_s: training seconds of the present epoch.
        samples_per_s: samples per second of each completed epoch [epochs].
        transitions: all transitions, in order.
        hits: number of samples read from the cache.
        misses: number of samples whose prefix was computed, though the plan had a cache.
        cache_bytes: the most bytes of a node's stores, by tier (``host``, ``disk``).
        metrics: metrics of the last evaluation.
        best_metrics: metrics of the best evaluation.
        evaluations_since_best: number of evaluations since then.
    """

    wall_s: float = 0.0
    setup_s: float = 0.0
    train_s: float = 0.0
    eval_s: float = 0.0
    transition_s: float = 0.0
    cache_advance_s: float = 0.0
    save_s: float = 0.0
    floor_s: float = 0.0
    epoch_train_s: float = 0.0
    samples_per_s: list[float] = field(default_factory=list)
    transitions: list[Transition] = field(default_factory=list)
    hits: int = 0
    misses: int = 0
    cache_bytes: Annotated[dict[str, int], BeforeValidator(_by_tier)] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    best_metrics: dict[str, float] = field(default_factory=dict)
    evaluations_since_best: int = 0

    def add_train(self, seconds: float) -> None:
        """Adds seconds of training."""
        self.train_s += seconds
        self.epoch_train_s += seconds

    def add_advance(self, advance: Advance) -> None:
        """Adds an advance pass, which is a part of the seconds of a decision that are added later. What it stores to
        evaluate on is evaluation, as it would be without a cache.
        """
        self.cache_advance_s += advance.seconds
        self.eval_s += advance.evaluation_s
        self.transition_s -= advance.seconds + advance.evaluation_s
        self.add_train(-advance.evaluation_s)

    def add_evaluation(self, metrics: dict[str, float], *, by: str) -> None:
        """Keeps the metrics as the last and, if they are better, as the best.

        The larger value of metric ``by`` is better, whatever is a number than whatever is none, and of equal ones the
        smaller loss.
        """

        def rank(found: dict[str, float]) -> tuple[float, float]:
            return (-math.inf if math.isnan(found[by]) else found[by], -found["loss"])

        self.metrics = metrics
        self.evaluations_since_best += 1
        if not self.best_metrics or rank(metrics) > rank(self.best_metrics):
            self.best_metrics, self.evaluations_since_best = metrics, 0

    def is_stale(self, patience: int | None) -> bool:
        """Whether so many evaluations in a row have brought nothing better; never without a number."""
        return patience is not None and self.evaluations_since_best >= patience

    def end_epoch(self, num_samples: int) -> None:
        """Ends an epoch of ``num_samples`` samples."""
        self.samples_per_s.append(num_samples / self.epoch_train_s if self.epoch_train_s else 0.0)
        self.epoch_train_s = 0.0

    def summary(
        self, config: Config, *, device_cache_bytes: int, steps: int, world_size: int, **others: Any
    ) -> Summary:
        """The summary of a run that has ended.

        Args:
            device_cache_bytes: the most bytes of the cache on a rank's device.
            others: of the summary's fields, those that neither the sums nor the configuration tell.
        """
        names = {of_summary.name for of_summary in fields(Summary)} & {own.name for own in fields(self)}
        held = CacheBytes(device=device_cache_bytes, **self.cache_bytes)
        return Summary(
            **{name: getattr(self, name) for name in names},
            task=config.task,
            model=config.model.name,
            dataset=config.data.name,
            world_size=world_size,
            epochs=config.train.epochs,
            steps=steps,
            global_batch_size=config.train.batch_size,
            seed=config.train.seed,
            cache=CacheUse(hits=self.hits, misses=self.misses, bytes=held),
            compute_floor_s=self.floor_s,
            **others,
        )
