"""The optimizer steps between two decisions: all in one epoch and under one plan, with checks and events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

from pipetransformer.cache import AutoCache
from pipetransformer.config import Config
from pipetransformer.config.calendar import Calendar
from pipetransformer.config.learning_rate import learning_rate
from pipetransformer.data import Batch
from pipetransformer.engine import Engine, PhaseSeconds
from pipetransformer.freeze import AutoFreeze
from pipetransformer.pipe.controller import AutoPipe
from pipetransformer.process.whereabouts import HERE
from pipetransformer.run import events
from pipetransformer.run.guards import Guards
from pipetransformer.run.pulse import Pulse
from pipetransformer.run.step_figures import StepFigures
from pipetransformer.run.timeline import Timeline


@dataclass(frozen=True, slots=True)
class StepRunner:
    """Runs steps of ``engine``, gives their norms to AutoFreeze and their times to AutoPipe, lets the guards check
    them, and tells their events.

    Attributes:
        tell: gives an event to all listeners.
        timeline: keeps one step of each plan.
        pulse: the ranks' agreement to end early; None where they do not ask.
    """

    config: Config
    engine: Engine
    calendar: Calendar
    autofreeze: AutoFreeze
    autopipe: AutoPipe
    autocache: AutoCache
    guards: Guards
    tell: events.Listener
    timeline: Timeline
    pulse: Pulse | None = None

    def run(self, batches: Sequence[Batch], *, first_step: int, num_steps: int) -> int:
        """Collective. Runs one step on each of the first ``num_steps`` batches; later ones are read ahead. Fewer where
        the ranks agree to end.

        Args:
            batches: global batches of one epoch, in order, to its end.
            first_step: number of the first step, from 0.

        Returns:
            The number of steps done, those before included.

        Raises:
            UserError: if a loss or a weight is not finite.
        """
        engine, plan, clock = self.engine, self.engine.plan, perf_counter
        calendar, step, stop = self.calendar, first_step, first_step + num_steps
        epoch = calendar.epoch(first_step)
        incoming, batches = engine.incoming(batches, epoch=epoch), batches[:num_steps]
        engine.chain.train()
        on_cpu = engine.chain.device.type == "cpu"
        HERE.step = step
        paused = start = clock()
        counts: Counter[str] = Counter()
        drawn, times = self.timeline.step_of(plan, first_step=first_step, stop=stop), engine.layout.executor.times
        for batch_plan in batches:
            waiting = clock()
            batch = incoming.take()
            engine.stepper.seconds.data += clock() - waiting
            lr = learning_rate(self.config.train, step=step, total_steps=calendar.total_steps)
            if step == drawn:
                times.spans = []
            engine.step(batch, step=step, lr=lr)
            step += 1
            if engine.stepper.skipped:
                self.guards.check_skipped(engine.stepper.skipped, last_step=step - 1)
                self.tell(events.Skipped(step))
            HERE.step = step
            if self.pulse is not None and self.pulse.beat():
                stop = step
            counts["num_steps"] += 1
            counts["sent_bytes"] += engine.layout.reducer.sent_bytes
            if batch.hidden is not None and plan.cached is not None:
                counts["hits" if batch.enters else "misses"] += batch.num_real
            read_bytes = self.autocache.read_bytes(batch_plan.ids) if batch.enters else 0
            self.tell(events.Stepped(step, epoch, plan, batch, read_bytes))
            if on_cpu:  # on a GPU, the check would wait for the device after every step
                self.guards.check_loss()
            if step % self.config.log.every == 0 or step == stop:
                self._log(step, seconds=clock() - paused, counts=counts)
                counts.clear()
                paused = clock()
            if step == stop:
                break
        self.autopipe.trained(plan, batches[: step - first_step], seconds=clock() - start)
        self.guards.check_weights(last_step=stop - 1)
        epoch_samples = len(engine.datasets["train"]) if calendar.ends_epoch(stop) else None
        self.tell(events.Trained(clock() - start, epoch_samples))
        if times.spans is not None:
            self.timeline.add(plan, times, step=drawn)
        return step

    def _log(self, step: int, *, seconds: float, counts: Mapping[str, int]) -> None:
        """Collective. Checks and tells the steps since the last call, and clears their figures."""
        engine = self.engine
        self.guards.check_losses()
        norms = engine.take_norms()
        self.autofreeze.observe(norms.sums, num_steps=norms.num_steps)
        figures = StepFigures.gather(engine.objective, engine.stepper.seconds, norms, seconds=seconds, **counts)
        self.autofreeze.trained(figures.loss, num_steps=figures.num_steps)
        self.tell(events.Logged(step, engine.plan, figures))
        self.autopipe.spent(engine.stepper.seconds)
        engine.stepper.seconds = PhaseSeconds()
        engine.objective.clear()
