"""The report of a run: a listener that turns events into the event log, live figures, totals and the summary.

It decides nothing.
"""

from __future__ import annotations

from dataclasses import asdict, astuple
from functools import singledispatchmethod
from time import perf_counter
from typing import IO, Any

from pydantic import TypeAdapter

from pipetransformer.config import Config
from pipetransformer.config.calendar import Calendar
from pipetransformer.pipe.measure.static_layouts import StaticLayouts
from pipetransformer.process.collectives import values_of_ranks
from pipetransformer.process.device import peak_memory_bytes
from pipetransformer.process.world import World
from pipetransformer.run import events, lines
from pipetransformer.run.compute_floor import ComputeFloor
from pipetransformer.run.folder import RunFolder, make_run_folder
from pipetransformer.run.time_left import TimeLeft
from pipetransformer.run.totals import Totals
from pipetransformer.run.tracking import Tracker, Transition, evaluation_metrics, position, say


class Report:
    """The report on one rank. Rank 0 writes the files, and nothing before ``Opened``.

    Args:
        started: start of the process's work on the job, by ``perf_counter``.
        best_by: name of the metric that decides which evaluation is the best.
        time_left: tells the time left; None where nobody asks.

    Attributes:
        folder: place of the run's files.
        totals: sums of the run so far.
        resumed_from: name of the checkpoint that the run continued from; None without one.
    """

    _tracker: Tracker

    def __init__(
        self,
        config: Config,
        world: World,
        folder: RunFolder,
        calendar: Calendar,
        *,
        started: float,
        best_by: str,
        time_left: TimeLeft | None = None,
    ) -> None:
        self.folder, self._time_left = folder, time_left
        self.totals = Totals()
        self.resumed_from: str | None = None
        self._config, self._world, self._total_steps = config, world, calendar.total_steps
        self._started, self._best_by = started, best_by
        self._floor = ComputeFloor()  # until the costs are measured
        self._wall_before = self._last_transition_s = self._seconds_logged = self._probe_s = 0.0
        self._decisions = list[tuple[int, int, str]]()
        self._is_open = False
        self._declined = set[int | None]()
        self._held, self._last_decided = (0, 0), (0, "")
        self._peak_bytes = self._cached_bytes = 0
        self._layouts: StaticLayouts | None = None  # that were timed
        self._t0_end: tuple[float, ...] = ()
        self._lock: IO[str] | None = None

    @singledispatchmethod
    def hear(self, event: events.Event) -> None:
        """Records an event, as the methods below say. Collective for ``Opened`` and ``Finished``."""
        raise NotImplementedError(f"{type(event).__name__} is not heard")

    def state_dict(self) -> dict[str, Any]:
        """The report's part of a checkpoint."""
        self.totals.wall_s = self._wall_seconds()
        return asdict(self.totals)

    def _wall_seconds(self) -> float:
        return self._wall_before + perf_counter() - self._started

    # ---- set-up ----------------------------------------------------------------------------------------------------

    @hear.register
    def _announced(self, event: events.Announced) -> None:
        for line in event.lines if self._world.rank == 0 else ():
            say(line)

    @hear.register
    def _opened(self, event: events.Opened) -> None:
        """Collective. Makes the run's folder and starts to write."""
        folder = self.folder
        self._lock = make_run_folder(folder, self._config)
        self._tracker = Tracker(self._config, rank=self._world.rank, run_dir=folder.path, run_id=folder.run_id)
        self._is_open = True
        if not folder.is_shared:
            self._tracker.line(f"run.dir: not all nodes see {folder.path}; no checkpoints are written there")

    @hear.register
    def _measured(self, event: events.Measured) -> None:
        """Records the measurements, and starts the compute floor from them."""
        layouts, profile = event.layouts, event.profile
        self._floor = ComputeFloor.measured(layouts, profile, world_size=self._world.size)
        if not layouts.rounds:
            self._tracker.line("nothing is timed (pipe.measure is false): plans come from counted work")
            return
        self._layouts = layouts
        self._tracker.line(lines.of_layouts(layouts))
        self._tracker.event(
            "calibration",
            static_seconds=layouts.seconds,
            static_plans=layouts.plans,
            best_pp=layouts.best_pp,
            timed=[{"plan": plan, "seconds": seconds} for plan, seconds in layouts.timed.items()],
            rounds=layouts.rounds,
            unit_costs=profile.measured,
            job_costs=profile.job,
        )

    @hear.register
    def _resumed(self, event: events.Resumed) -> None:
        """Continues from a checkpoint's totals, and records the settings that have changed since."""
        changes = self.folder.changes
        passed = {"damaged": list(event.damaged)} if event.damaged else {}
        self._tracker.event("resume", step=event.step, resumed_from=event.checkpoint, changes=changes, **passed)
        told = [f"a checkpoint is passed over, {each}; going on from {event.checkpoint}" for each in event.damaged]
        for line in (*told, *(f"resumed with another setting: {change}" for change in changes)):
            self._tracker.line(line)
        self.totals = TypeAdapter(Totals).validate_python(event.totals)
        self.resumed_from = event.checkpoint
        self._wall_before = self.totals.wall_s

    @hear.register
    def _training_starts(self, event: events.TrainingStarts) -> None:
        self.totals.setup_s += (seconds := perf_counter() - self._started - self._probe_s)
        config, plan = self._config, event.plan
        of_run: dict[str, Any] = {"total_steps": self._total_steps, "resumed_from": self.resumed_from}
        self._tracker.event(
            "run",
            run_id=self.folder.run_id,
            world_size=self._world.size,
            plan=plan,
            **of_run,
            precision=config.train.precision,
            wide_attention=config.train.wide_attention,
            views=config.cache.views,
        )
        start = lines.of_start(self.folder.run_id, config, plan, **of_run)
        self._tracker.line(f"{start}; set-up took {seconds:.1f} s")
        for line in lines.of_freezing(event.freezing, config, plan=plan, total_steps=self._total_steps):
            self._tracker.line(line)

    # ---- decisions and transitions ---------------------------------------------------------------------------------

    @hear.register
    def _decided(self, event: events.Decided) -> None:
        """Prints a line for each new number of blocks, and for each new reason of the guard."""
        decision = event.decision
        self._tracker.event("freeze_decision", **asdict(decision))
        line, told = lines.of_decision(decision, policy=self._config.freeze.policy), (decision.frozen, decision.reason)
        if decision.asked is None and not decision.reason:  # the guard looked, and changes nothing
            return
        self._decisions.append((decision.step, decision.frozen, line))
        if told != self._last_decided:
            self._last_decided = told
            self._tracker.line(line)

    @hear.register
    def _probed(self, event: events.Probed) -> None:
        """Its time is one of training and not of set-up: without freezing, no one would need it."""
        self.totals.train_s += event.seconds
        self._probe_s = event.seconds
        self._tracker.event("probe", **asdict(event))
        for line in lines.of_probe(event.scores, free=event.free, seconds=event.seconds):
            self._tracker.line(line)

    @hear.register
    def _watched(self, event: events.Watched) -> None:
        verdict = event.verdict
        self._tracker.event("guard", **asdict(verdict), seconds=event.seconds)
        if verdict.judged:
            self._tracker.line(lines.of_verdict(verdict))

    @hear.register
    def _held_back(self, event: events.Held) -> None:
        """Prints one line for each new pair of numbers; every event is recorded."""
        frozen, wanted = event.frozen, event.wanted
        self._tracker.event("held", **asdict(event))
        if (frozen, wanted) != self._held:
            self._held = (frozen, wanted)
            self._tracker.line(
                f"step {event.step}: {frozen} blocks are frozen where AutoFreeze wants {wanted}: {event.reason}"
            )

    @hear.register
    def _adopted(self, event: events.Adopted) -> None:
        evidence = {} if event.choice is None else {"choice": event.choice}
        self._tracker.event("plan", step=event.step, plan=event.plan, reason=event.reason, **evidence)

    @hear.register
    def _moved(self, event: events.Moved) -> None:
        plan, move = event.plan, event.move
        self._last_transition_s = move.seconds
        self.totals.transitions.append(
            Transition(
                step=event.step,
                epoch=event.epoch,
                frozen=plan.frozen,
                pp=plan.pp,
                dp=plan.dp,
                microbatches=plan.num_microbatches,
                boundaries=plan.boundaries,
                seconds=move.seconds,
                bytes_moved=move.num_bytes,
                reason=event.reason,
            )
        )
        self._tracker.event(
            "transition",
            step=event.step,
            epoch=event.epoch,
            plan=plan,
            seconds=move.seconds,
            bytes_moved=move.num_bytes,
            reason=event.reason,
        )
        self._tracker.line(lines.of_move(event))

    @hear.register
    def _advanced(self, event: events.Advanced) -> None:
        advance, held = event.advance, self.totals.cache_bytes
        held[event.tier] = max(held.get(event.tier, 0), event.num_bytes)
        if not event.is_refill:
            self.totals.add_advance(advance)
            for (first, length), count in advance.samples.items():
                self.totals.floor_s += self._floor.of_advance(
                    length=length, num_samples=count, first=first, stop=advance.stop
                )
        place = {"step": event.step, "boundary": event.boundary, "tier": event.tier, "found": advance.is_found}
        samples = {"samples": advance.samples.total(), "evaluation_samples": advance.evaluation_samples}
        seconds = {"seconds": advance.seconds, "evaluation_s": advance.evaluation_s, "replaces": advance.replaces}
        self._tracker.event("advance", **place, **samples, **seconds, rounding=advance.rounding)
        self._tracker.line(lines.of_advance(event, dtype=self._config.cache.dtype))

    @hear.register
    def _cache_declined(self, event: events.CacheDeclined) -> None:
        """Records the first event of each boundary only."""
        if event.boundary not in self._declined:
            self._declined.add(event.boundary)
            self._tracker.event("cache_declined", **asdict(event))
            told, rest = "no cache", "frozen blocks"
            if event.boundary is not None:
                told, rest = f"the cache stays at block {event.boundary}", "the other frozen blocks"
            self._tracker.line(f"step {event.step}: {told}: {event.reason}; {rest} are computed in each step")

    @hear.register
    def _decision_ends(self, event: events.DecisionEnds) -> None:
        """Adds the time of the decision itself with that of its move: it is a cost of being elastic too."""
        self.totals.add_train(event.seconds)
        self.totals.transition_s += event.seconds

    # ---- steps and evaluations -------------------------------------------------------------------------------------

    @hear.register
    def _stepped(self, event: events.Stepped) -> None:
        """Moves the bar, which costs a microsecond. The last step is shown later, with its figures."""
        plan, batch = event.plan, event.batch
        self.totals.floor_s += self._floor.of_step(
            length=batch.length,
            num_samples=batch.global_count,
            first_active=plan.first_active,
            enters=batch.enters,
            read_bytes=event.read_bytes,
        )
        if event.step < self._total_steps:
            self._tracker.step(
                event.step,
                total_steps=self._total_steps,
                epoch=event.epoch + 1,
                num_epochs=self._config.train.epochs,
                frozen=plan.frozen,
                num_blocks=plan.num_blocks,
                pp=plan.pp,
                dp=plan.dp,
                microbatches=plan.num_microbatches,
                time_left=self._time_left,
            )

    @hear.register
    def _skipped(self, event: events.Skipped) -> None:
        self._tracker.event("skipped", step=event.step)
        self._tracker.line(f"step {event.step}: the update is skipped: a loss or a gradient is not finite")

    @hear.register
    def _logged(self, event: events.Logged) -> None:
        """Records the steps since the last pause."""
        found = event.figures
        self.totals.hits += found.hits
        self.totals.misses += found.misses
        self._tracker.event("steps", step=event.step, **asdict(found))
        self._seconds_logged += found.seconds
        metrics = found.metrics(event.plan, transition_seconds=self._last_transition_s)
        self._tracker.metrics({**metrics, **self._place(event.step)}, step=event.step)
        self._tracker.step(
            event.step,
            total_steps=self._total_steps,
            loss=found.loss,
            lr=self._place(event.step)["lr"],
            samples_per_second=found.samples_per_s,
            cache_hit_rate=found.hit_rate,
        )
        self._last_transition_s = 0.0

    def _place(self, step: int) -> dict[str, float]:
        seconds = self.totals.train_s + self._seconds_logged
        return position(self._config.train, step=step, total_steps=self._total_steps, train_seconds=seconds)

    @hear.register
    def _trained(self, event: events.Trained) -> None:
        self.totals.add_train(event.seconds)
        self._seconds_logged = 0.0
        if event.epoch_samples is not None:
            self.totals.end_epoch(event.epoch_samples)

    @hear.register
    def _evaluated(self, event: events.Evaluated) -> None:
        """Records an evaluation. Its predictions replace those of the evaluation before."""
        totals, metrics, by = self.totals, event.metrics, self._best_by
        totals.add_evaluation(metrics, by=by)
        totals.eval_s += event.seconds
        if event.predictions is not None:
            self._tracker.predictions(event.predictions)
        best, of_event = totals.best_metrics, {"step": event.step, "epoch": event.epoch, "metrics": metrics}
        self._tracker.event("evaluation", **of_event, best_metrics=best, seconds=event.seconds, train_s=totals.train_s)
        shown = {**evaluation_metrics(self._config.task, metrics, best=best), **self._place(event.step)}
        self._tracker.evaluation(shown, step=event.step)
        if event.step < self._total_steps:
            self._tracker.step(event.step, total_steps=self._total_steps, metric=(by, metrics[by]))
        told = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        self._tracker.line(f"step {event.step}: evaluation {told} (best {by} {best[by]:.4f}), {event.seconds:.1f} s")

    @hear.register
    def _saved(self, event: events.Saved) -> None:
        self.totals.save_s += event.seconds
        self._tracker.event("checkpoint", **asdict(event))

    @hear.register
    def _not_saved(self, event: events.NotSaved) -> None:
        self._tracker.event("not_saved", **asdict(event))
        self._tracker.line(lines.of_not_saved(event))

    # ---- the end ---------------------------------------------------------------------------------------------------

    @hear.register
    def _ends_early(self, event: events.EndsEarly) -> None:
        self._tracker.event("ends_early", **asdict(event))
        self._tracker.line(f"step {event.step}: told to end: {event.outcome}")

    @hear.register
    def _training_ends(self, event: events.TrainingEnds) -> None:
        self._peak_bytes, self._cached_bytes = peak_memory_bytes(self._world.device), event.cached_bytes

    @hear.register
    def _timed_again(self, event: events.TimedAgain) -> None:
        self._t0_end = event.seconds

    @hear.register
    def _finished(self, event: events.Finished) -> None:
        """Collective. Writes and shows the summary."""
        totals, timed = self.totals, self._layouts
        peaks, cached = zip(*values_of_ranks((self._peak_bytes, self._cached_bytes)))
        self._tracker.event("end", step=event.steps, metrics=totals.metrics, train_s=totals.train_s)
        totals.wall_s = self._wall_seconds()
        summary = totals.summary(
            self._config,
            run_id=self.folder.run_id,
            world_size=self._world.size,
            steps=event.steps,
            peak_memory_bytes=peaks,
            device_cache_bytes=max(cached),
            static_step_s=None if timed is None else timed.mean_seconds[timed.best_pp],
            t0_start_s=() if timed is None else timed.rounds,
            t0_end_s=self._t0_end,
            resumed_from=self.resumed_from,
        )
        if self._decisions and not any(f for _, f, _ in self._decisions) and not totals.transitions:
            self._tracker.line(f"no block was frozen; the last decision: {self._decisions[-1][2]}")
        self._tracker.table("decisions", ("step", "frozen blocks", "why"), self._decisions)
        self._tracker.table("transitions", [*Transition.__slots__], map(astuple, totals.transitions))
        self._tracker.summarise(summary)

    @hear.register
    def _closed(self, event: events.Closed) -> None:
        if self._is_open:
            self._tracker.close(exit_code=event.exit_code)
        if self._lock is not None:
            self._lock.close()
