"""The optimizer steps between two decisions: all in one epoch and under one plan, with checks and events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

from pipetransformer.cache import AutoCache
from pipetransformer.config import Config
from pipetransformer.config.calendar import Calendar
from pipetransformer.data import Batch
from pipetransformer.engine import Engine, PhaseSeconds
from pipetransformer.engine.optim import learning_rate
from pipetransformer.pipe.controller import AutoPipe
from pipetransformer.run import events
from pipetransformer.run.guards import Guards


class StepRunner:
    """Runs steps of ``engine``, gives their times to AutoPipe, lets the guards check them, and tells their events.

    Args:
        tell: gives an event to all listeners.
    """

    def __init__(
        self,
        config: Config,
        *,
        engine: Engine,
        calendar: Calendar,
        autopipe: AutoPipe,
        autocache: AutoCache,
        guards: Guards,
        tell: Callable[[events.Event], None],
    ) -> None:
        self._train, self._log_every = config.train, config.log.every
        self._engine, self._calendar, self._guards, self._tell = engine, calendar, guards, tell
        self._autopipe, self._autocache = autopipe, autocache

    def run(self, batches: Sequence[Batch], *, first_step: int) -> None:
        """Collective. Runs one step on each batch.

        Args:
            batches: global batches of one epoch, in order.
            first_step: number of the first step, from 0.

        Raises:
            UserError: if a loss or a weight is not finite.
        """
        engine, plan, clock = self._engine, self._engine.plan, perf_counter
        calendar, step, stop = self._calendar, first_step, first_step + len(batches)
        epoch = calendar.epoch(first_step)
        incoming = engine.feed("train").batches(batches, epoch=epoch)
        engine.chain.train()
        on_cpu = engine.chain.device.type == "cpu"
        paused = start = clock()
        for batch_plan in batches:
            waiting = clock()
            batch = next(incoming)
            engine.stepper.seconds.data += clock() - waiting
            lr = learning_rate(self._train, step=step, total_steps=calendar.total_steps)
            engine.step(batch, step=step, lr=lr)
            step += 1
            read_bytes = self._autocache.read_bytes(batch_plan.ids) if batch.enters else 0
            self._tell(events.Stepped(step, epoch, plan, batch, read_bytes))
            if on_cpu:  # on a GPU, the check would wait for the device after every step
                self._guards.check_loss()
            if step % self._log_every == 0 or step == stop:
                self._guards.check_losses()
                self._log(step, seconds=clock() - paused)
                paused = clock()
        incoming.close()
        self._autopipe.trained(plan, batches)
        self._guards.check_weights(engine.layout.parameters.values(), last_step=stop - 1)
        epoch_samples = len(engine.datasets["train"]) if calendar.ends_epoch(stop) else None
        self._tell(events.Trained(clock() - start, epoch_samples))

    def _log(self, step: int, *, seconds: float) -> None:
        """Collective. Tells the figures of the steps since the last pause."""
        objective, phases = self._engine.objective, self._engine.stepper.seconds
        sums = float(objective.loss_sum), float(objective.num_correct), float(objective.num_samples)
        self._tell(events.Logged(step, self._engine.plan, *sums, phases, seconds))
        objective.clear()
        self._autopipe.spent(phases)
        self._engine.stepper.seconds = PhaseSeconds()
