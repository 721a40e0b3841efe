"""The work of one rank: it enters plans, runs steps, evaluates and gathers the weights, in the same way for every plan.

    engine = Engine(chain, datasets, config, world)
    engine.enter(plan)
    for batch in engine.feed("train").batches(batches, epoch=0):
        engine.step(batch, step=step, lr=lr)
    metrics, weights = engine.evaluate(), [dict(of_unit) for of_unit in engine.weights()]

The trainer calls it with the plans of the controllers, benchmarks and tests with plans of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pipetransformer.cache import ActivationStore
from pipetransformer.config import Config
from pipetransformer.data import TRAINING, Batch, Dataset, Mixing, epoch_batches
from pipetransformer.dp import AutoDP, OptimizerState
from pipetransformer.engine.evaluate import evaluate, sample_losses
from pipetransformer.engine.executor import StepInput
from pipetransformer.engine.feed import Feed, Incoming
from pipetransformer.engine.layout import Layout
from pipetransformer.engine.objective import Loss, Objective, num_outputs, weights_of_classes
from pipetransformer.engine.similarity import similarities, watched_batches
from pipetransformer.engine.step import NormSums, Probe, Stepper
from pipetransformer.engine.weights import gathered_weights, weight_digests
from pipetransformer.models import Chain
from pipetransformer.plan import ParallelPlan
from pipetransformer.process.collectives import slowest
from pipetransformer.process.device import synchronize
from pipetransformer.process.heap import release_freed_memory
from pipetransformer.process.world import World


@dataclass(frozen=True, slots=True)
class Move:
    """The cost of a transition.

    Attributes:
        seconds: duration on the slowest rank.
        num_bytes: bytes that all ranks together received.
    """

    seconds: float
    num_bytes: int


class Engine:
    """The engine of one rank. All ranks call it alike: methods are collective, but for ``feed`` and ``close_feeds``.

    Args:
        datasets: datasets by split: ``train`` for training, ``set_aside`` for ``sample_losses``, all others for
            evaluation.
        autodp: brings the units; None for one of its own, which forgets the state of frozen units.
        stores: gives the store of a split, or None where there is none.
        probe: called with (step, local gradients by name) after the reduction and before clipping.
        needs_norms: whether ``take_norms`` is to count every step.
        loss: of each sample, in the place of the usual one; see ``Objective``.

    Attributes:
        objective: the loss, with its running figures.
        stepper: the optimizer steps, with their times.
        entered: the plan that was entered last, or is just being entered.
    """

    entered: ParallelPlan

    def __init__(
        self,
        chain: Chain,
        datasets: Mapping[str, Dataset],
        config: Config,
        world: World,
        *,
        autodp: AutoDP | None = None,
        stores: Callable[[str], ActivationStore | None] = lambda split: None,
        probe: Probe | None = None,
        needs_norms: bool = False,
        loss: Loss | None = None,
    ) -> None:
        train = config.train
        self.chain, self.datasets = chain, datasets
        self.autodp = autodp or AutoDP(config, chain=chain, world=world, keeps_frozen_state=False)
        self._config, self._world, self._stores = config, world, stores
        num_classes = num_outputs(chain.model) if train.class_weights is not None else 0
        weights = weights_of_classes(train.class_weights, datasets["train"], num_classes=num_classes)
        self.objective = Objective(
            datasets["train"].kind,
            label_smoothing=train.label_smoothing,
            device=world.device,
            class_weights=weights,
            of_each=loss,
        )
        self.stepper = Stepper(
            chain, train, objective=self.objective, rank=world.rank, probe=probe, needs_norms=needs_norms
        )
        self._mixing = Mixing(train, num_classes=num_outputs(chain.model)) if train.mixes else None
        self._layout: Layout | None = None
        self._feeds: dict[str, Feed] = {}
        self._most_cached = 0
        self._incoming: Incoming | None = None
        self._rests = False

    @property
    def layout(self) -> Layout:
        """The layout of the present plan."""
        assert self._layout is not None, "no plan was entered"
        return self._layout

    @property
    def plan(self) -> ParallelPlan:
        """The present plan: the one that was entered last."""
        return self.layout.plan

    # ---- plans -----------------------------------------------------------------------------------------------------

    def enter(self, plan: ParallelPlan, *, state: OptimizerState | None = None) -> Move:
        """Takes this rank to ``plan``, with weights, optimizer state and sums of gradient norms.

        Args:
            state: this rank's optimizer state by parameter name, from a checkpoint; None for the present state.
        """
        self.entered = plan
        self.close_feeds()
        if self._layout is not None:
            self.stepper.settle_norms(self._layout)
            self._layout.calm(before=plan.first_active)
        start = perf_counter()
        stepped = None if self._layout is None else self._layout.stepped
        arrival = self.autodp.enter(plan, state=self._left(state or {}), stepped=stepped)
        self._layout = Layout(
            plan,
            arrival,
            chain=self.chain,
            config=self._config,
            rank=self._world.rank,
            objective=self.objective,
        )
        if self._rests:
            self._layout.rest()
        if self.chain.device.type == "cpu":
            release_freed_memory()
        synchronize(self.chain.device)
        seconds, num_bytes = slowest(perf_counter() - start), torch.tensor(arrival.num_bytes)
        dist.all_reduce(num_bytes)
        return Move(seconds=seconds, num_bytes=int(num_bytes))

    def rest(self) -> None:
        """Tells that no block will freeze any more."""
        self._rests = True
        self.layout.rest()

    def _left(self, state: OptimizerState) -> OptimizerState:
        """Leaves the present layout, if any. Returns ``state`` with that of the layout, and keeps none of it: else it
        would lie beside that of the next one."""
        layout, self._layout = self._layout, None
        if layout is None:
            return dict(state)
        layout.close()
        return {**state, **layout.state()}

    def state_holders(self) -> dict[int, range]:
        """The present holders of the optimizer state of each unit."""
        return self.autodp.state_holders(self.layout.stepped)

    @property
    def untouched(self) -> int:
        """The number of leading units that no step has trained."""
        return self.autodp.untouched(self.layout.stepped)

    def forget_steps(self) -> None:
        """Deletes optimizer state, losses, norms and times, as needed after steps that were only timed."""
        self.layout.forget_state()
        self.stepper.clear()
        self.objective.clear()

    def forget(self) -> None:
        """Leaves its plan: nobody holds weights or optimizer state, as before training."""
        self.close()
        self.autodp.forget()

    def close_feeds(self) -> None:
        """Drops the feeds, which read the cache's stores. Not collective."""
        self._drop_incoming()
        self._most_cached = self.cached_bytes
        self._feeds.clear()

    def close(self) -> None:
        """Ends the work. The weights, or their averages, stay on their ranks."""
        self.close_feeds()
        if self._layout is not None:
            self._layout.close()
            self._layout.settle()
            self._layout = None
        self.autodp.close()

    # ---- training --------------------------------------------------------------------------------------------------

    def feed(self, split: str) -> Feed:
        """The inputs of this rank under the present plan, made at the first use. Not collective."""
        if split not in self._feeds:
            self._feeds[split] = Feed(
                self.chain,
                self.datasets[split],
                self.plan,
                rank=self._world.rank,
                store=self._stores(split),
                num_workers=self._config.data.num_workers,
                skips_masks=split == "train",
                device_budget=(self._config.cache.device_budget or 0) if split == "train" else 0,
                mixing=self._mixing if split == "train" else None,
            )
        return self._feeds[split]

    def incoming(self, batches: Sequence[Batch], *, epoch: int) -> Incoming:
        """The inputs of this rank for the rest of an epoch, read ahead. Not collective.

        Given again with the batches that are left, it goes on with the same threads or worker processes, until the job
        enters another plan.

        Args:
            batches: all global batches from the next one to the last one of the epoch.
        """
        found = self._incoming
        if found is None or (found.epoch, found.left) != (epoch, len(batches)):
            self._drop_incoming()
            inputs = self.feed("train").batches(batches, epoch=epoch)
            found = self._incoming = Incoming(inputs, epoch=epoch, left=len(batches))
        return found

    def _drop_incoming(self) -> None:
        if self._incoming is not None:
            self._incoming.close()
            self._incoming = None

    @property
    def cached_bytes(self) -> int:
        """The most bytes of the cache that this rank's device held so far, beside the node's stores."""
        return max([self._most_cached, *(feed.device_bytes for feed in self._feeds.values())])

    def step(self, batch: StepInput, *, step: int, lr: float, probed: bool = True) -> None:
        """Runs one optimizer step.

        Args:
            batch: a batch of ``feed("train")``.
            step: number of the step, from 0.
            lr: learning rate of the step.
            probed: whether the probe sees it.
        """
        self.stepper.run(self.layout, self.feed("train"), batch, step=step, lr=lr, probed=probed)

    def take_norms(self) -> NormSums:
        """Gradient norms since the last call."""
        return self.stepper.take_norms(self.layout)

    # ---- results ---------------------------------------------------------------------------------------------------

    def evaluate(self) -> dict[str, float]:
        """The metrics of all splits but ``train`` and ``set_aside``, with the loss, the same on every rank.

        Splits other than ``eval`` add ``_SPLIT`` to the names.

        Raises:
            NotFinite: if a loss is not finite.
        """
        self.chain.train(False)
        metrics: dict[str, float] = {}
        with self.layout.averaged():
            for split, dataset in self.datasets.items():
                if split in TRAINING:
                    continue
                batches = self._in_order(dataset)
                found = evaluate(self.layout.executor, self.feed(split), dataset, self.objective, batches=batches)
                suffix = "" if split == "eval" else f"_{split}"
                metrics |= {f"{name}{suffix}": value for name, value in found.items()}
        return metrics

    def sample_losses(self, split: str) -> np.ndarray:
        """The loss of every sample of a split, float64 [samples], the same on every rank."""
        self.chain.train(False)
        dataset = self.datasets[split]
        batches = self._in_order(dataset)
        return sample_losses(self.layout.executor, self.feed(split), dataset, self.objective, batches=batches)

    def similarities(self) -> np.ndarray:
        """How alike some training samples are to each other behind every block [blocks, samples, samples], the same on
        every rank; zeros behind a block that the cache spares."""
        self.chain.train(False)
        self._drop_incoming()  # which reads ahead into the same buffers
        batches = watched_batches(self._in_order(self.datasets["train"]))
        self.objective.begin(step=-1)
        found = similarities(self.chain, self.layout.executor, self.feed("train"), batches=batches)
        self.objective.clear()
        return found

    def _in_order(self, dataset: Dataset) -> Sequence[Batch]:
        """Global batches of all samples."""
        batch_size, num_nodes = self._config.train.batch_size, self._world.sample_nodes
        return epoch_batches(
            dataset.lengths, batch_size=batch_size, seed=0, epoch=0, shuffle=False, num_nodes=num_nodes
        )

    def weights(self) -> Iterator[Mapping[str, Tensor]]:
        """Values by name of parameters and persistent buffers, on the CPU of rank 0, unit by unit; where weights are
        averaged, their averages.

        Nothing on the other ranks, which must ask for them as well, to the end.
        """
        with self.layout.averaged() if self._layout is not None else nullcontext():
            yield from gathered_weights(self.chain, self.autodp, world=self._world)

    def weight_digests(self) -> dict[str, int]:
        """A digest of each parameter that all replicas of this rank's stages have, by name."""
        return {} if self.plan.shard == "full" else weight_digests(self.layout.parameters)
