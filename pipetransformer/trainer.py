"""The training loop. When a decision is due, it asks four controllers, in this order:

AutoFreeze  probe, norms, losses      -> n, how many leading blocks are frozen now
AutoPipe    n, measured layer costs   -> ParallelPlan(n, pp, dp, boundaries, microbatches, schedule, cached)
AutoDP      old plan, new plan        -> transfers; the same ranks re-meshed in place
AutoCache   n, sample ids             -> activations at the freeze boundary, read instead of computed

The engine does the work between two decisions. Listeners are told every event, the report before all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from signal import SIGTERM
from time import perf_counter

from pipetransformer.cache import AutoCache
from pipetransformer.config import Config
from pipetransformer.config.calendar import Calendar
from pipetransformer.data import SET_ASIDE
from pipetransformer.dp import AutoDP
from pipetransformer.engine import Engine, Probe
from pipetransformer.errors import UserError
from pipetransformer.freeze import AutoFreeze, Freezing, Payoff
from pipetransformer.pipe.controller import AutoPipe
from pipetransformer.pipe.planner.answers import Choice
from pipetransformer.plan import ParallelPlan
from pipetransformer.process.agreement import agree, agree_on_settings
from pipetransformer.process.collectives import given_to, led_by
from pipetransformer.process.device import reset_peak_memory
from pipetransformer.process.shutdown import Interrupted, is_told, noted
from pipetransformer.process.whereabouts import HERE
from pipetransformer.process.world import World
from pipetransformer.run import events, lines, out_of_memory
from pipetransformer.run.checkpoint import CheckpointStore
from pipetransformer.run.folder import find_run_folder, with_first_nodes, with_resumption
from pipetransformer.run.guards import Guards
from pipetransformer.run.job import JobMaker, build_job
from pipetransformer.run.origin import Origin
from pipetransformer.run.precision import with_past_choices
from pipetransformer.run.probing import probe as probe_job
from pipetransformer.run.pulse import Pulse
from pipetransformer.run.report import Report
from pipetransformer.run.saved_model import save_model
from pipetransformer.run.steps import StepRunner
from pipetransformer.run.time_left import TimeLeft
from pipetransformer.run.timeline import Timeline


class Trainer:
    """Trains one job on this rank; every rank of ``world`` makes one and calls ``run``.

    Args:
        probe: called with (step, local gradients by name) after the reduction and before clipping.
        timed: whether unit costs and static layouts are measured before training. Only a replay can do without, and
            then it has no compute floor.
        listeners: called with every event, after the report. Collective ones must be given on every rank.
        make_job: builds model and data.

    Raises:
        UserError: for any mistake in the configuration, or in the files that it names.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        *,
        probe: Probe | None = None,
        timed: bool = True,
        listeners: Sequence[events.Listener] = (),
        make_job: JobMaker = build_job,
    ) -> None:
        started = perf_counter()
        HERE.step = 0
        HERE.enter("set-up")
        self.timed, self.step = timed, 0
        agree_on_settings(config.of_all_nodes)
        goes_on, config = bool(config.run.resume), with_past_choices(with_resumption(config))
        self.world = world = with_first_nodes(world, config)
        folder = find_run_folder(config, num_nodes=world.num_nodes)
        if goes_on:
            config = out_of_memory.under_limit(config, led_by(0, lambda: out_of_memory.limit_in(folder.path)))
        if not folder.is_shared:  # a resumption would need all files of a checkpoint on every node
            config = config.with_overrides({"checkpoint.every": None})
        self.job = job = make_job(config, world, lead=partial(led_by, world.rank - world.local_rank))
        self.config, chain = (config := job.config), job.chain
        per_epoch = len(job.train_batches(0))
        calendar = self.calendar = Calendar.of(config, batches_per_epoch=per_epoch)
        self.checkpoints = CheckpointStore(config, run_dir=folder.path, job=job, calendar=calendar, world=world)
        self.origin = Origin(config, job, folder=folder, checkpoints=self.checkpoints, calendar=calendar, world=world)
        blocks = chain.num_blocks
        self.autofreeze = AutoFreeze.of(config, num_blocks=blocks, batches_per_epoch=per_epoch, guard=job.guard)
        self.autopipe = AutoPipe(config, chain=chain, world=world, calendar=calendar)
        keeps_state = bool(self.origin.replayed) or self.autofreeze.may_unfreeze
        self.autodp = AutoDP(config, chain=chain, world=world, keeps_frozen_state=keeps_state)
        self.autocache = AutoCache(config, chain=chain, datasets=job.datasets, world=world)
        self.engine = Engine(
            chain,
            job.datasets,
            config,
            world,
            autodp=self.autodp,
            stores=self.autocache.store,
            probe=probe,
            needs_norms=self.autofreeze.needs_norms,
            loss=job.loss,
        )
        self.guards = Guards(self.engine, world.rank, self.checkpoints)
        self.pulse = Pulse(is_told) if config.run.on_sigterm == "save" else None
        parts = (self.autofreeze, self.autopipe, self.autocache)
        self.steps = StepRunner(
            *(config, self.engine, calendar, *parts),
            guards=self.guards,
            tell=self._tell,
            timeline=Timeline(folder.path, rank=world.rank, local_size=world.local_size),
            pulse=self.pulse,
        )
        self.time_left = TimeLeft(calendar, *parts, evaluated=job.evaluated_share)
        self.report = Report(
            config, world, folder, calendar, started=started, best_by=job.best_by, time_left=self.time_left
        )
        self.listeners: tuple[events.Listener, ...] = (self.time_left.hear, self.report.hear, *listeners)

    def run(self) -> None:
        """Trains to the end. The README describes the folder that a run leaves."""
        exit_code = 1
        try:
            if self.report.folder.ended_at == self.calendar.total_steps:
                self._announce(lines.of_ended(self.report.folder.run_id, steps=self.calendar.total_steps))
                exit_code = 0
                return
            self._start()
            with noted(self.config.run.grace) if self.pulse is not None else nullcontext():
                self._run_steps()
                self._end()
            exit_code = 0
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory.in_training(error):
                raise
            raise out_of_memory.told(error, self.report.folder.path, self.autopipe, self.engine.entered) from error
        finally:
            self.engine.close_feeds()
            self.checkpoints.writer.close(has_ended=exit_code == 0)
            self.autocache.close(is_interrupted=exit_code != 0)
            self._tell(events.Closed(exit_code))

    def _run_steps(self) -> None:
        """Takes all steps, with what is due between them."""
        calendar = self.calendar
        while self.step < calendar.total_steps and not self.report.totals.is_stale(self.config.train.early_stopping):
            self._decide()
            self._train(stop=calendar.next_pause(self.step, self._decision_is_due))
            if calendar.verification_is_due(self.step):
                self.guards.compare_replicas(step=self.step)
            if calendar.evaluation_is_due(self.step):
                self._evaluate()
            self._hear_of_checkpoint(wait=False)
            if self.pulse is not None and self.pulse.ends and self.step < calendar.total_steps:
                self._end_early()  # what is due before a checkpoint is done: a resumed run does not do it again
            if calendar.checkpoint_is_due(self.step):
                self._save_checkpoint()
        if not calendar.total_steps:
            self._evaluate()

    def _end(self) -> None:
        self._save_model("final")
        self._hear_of_checkpoint(wait=True)
        self._tell(events.TrainingEnds(self.engine.cached_bytes))
        if self.timed:
            self._tell(events.TimedAgain(self.autopipe.time_again(self.engine)))
        self._tell(events.Finished(self.step))
        self.engine.close()

    # ---- the controllers -------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        """Asks the controllers if a decision is due, and takes the job to their plan."""
        start = perf_counter()
        if self.origin.replayed:
            plan = self.origin.replayed.get(self.step, self.engine.plan)
            if plan != self.engine.plan:
                self._enter(plan, reason="replayed")
        elif self.autofreeze.due(self.step):
            self._decide_live(self.engine.plan)
        self._tell(events.DecisionEnds(perf_counter() - start))

    def _decide_live(self, current: ParallelPlan) -> None:
        autofreeze = self.autofreeze
        was_tentative = autofreeze.tentative_from is not None
        if autofreeze.guard_is_due(self.step):
            self._watch()
        offers = partial(
            self.autocache.offers,
            evaluations=self.calendar.evaluations_from(self.step),
            guard_passes=autofreeze.passes_from(self.step),
            at_start=self.step == 0,
        )
        judged_at = autofreeze.judged_at(self.step)
        gains = partial(self.autopipe.gains, step=self.step, current=current, offers=offers, judged_at=judged_at)
        if autofreeze.needs_similarities(self.step):
            autofreeze.compared(self.engine.similarities().reshape(self.job.chain.num_blocks, -1).tolist())
        decision = autofreeze.decide(self.step, frozen=current.frozen, payoff=lambda frozen: Payoff(*gains(frozen)))
        is_trial = decision.frozen > current.frozen and judged_at is not None
        if is_trial and not autofreeze.guard_is_due(self.step):
            self._watch()
        self._tell(events.Decided(decision))
        tentative_from = current.frozen if is_trial else autofreeze.tentative_from
        settled = self.autopipe.settle(
            decision.frozen,
            step=self.step,
            current=current,
            offers=partial(offers, may_advance=tentative_from is None),
            tentative_from=tentative_from,
            is_confirmed=(was_tentative and autofreeze.tentative_from is None) or (self.step == 0 < current.frozen),
        )
        if settled.frozen > current.frozen:
            autofreeze.froze(self.step, before=current.frozen, now=settled.frozen)
        if settled.reason:
            self._tell(events.Held(self.step, settled.frozen, decision.frozen, settled.reason))
        if settled.choice is not None:
            reason = decision.cause(self.config.freeze.policy, before=current.frozen, settled=settled.frozen)
            self._enter(settled.choice.plan, reason=reason, choice=settled.choice)
        if settled.frozen <= decision.frozen and not autofreeze.needs_frozen_state:
            self.autodp.let_go(self.engine.plan)

    def _watch(self) -> None:
        """Looks at the samples set aside, for the guard."""
        start = perf_counter()
        losses = self.engine.sample_losses(SET_ASIDE).tolist()
        verdict = self.autofreeze.watch(self.step, losses, frozen=self.engine.plan.frozen)
        self._tell(events.Watched(verdict, perf_counter() - start))

    def _enter(self, plan: ParallelPlan, *, reason: str, choice: Choice | None = None) -> None:
        """Takes the job to ``plan`` (AutoDP moves weights and state) and the cache to its boundary (AutoCache)."""
        HERE.enter("transition")
        old = self.engine.plan
        self.autocache.follow(plan.frozen)
        plan = self._with_cache(plan, at_start=self.step == 0)
        self._tell(events.Adopted(self.step, plan, reason, choice))
        agree("plan", (self.step, plan))
        move = self.engine.enter(plan)
        self._tell(events.Moved(self.step, self.epoch, old, plan, move, reason))
        if plan.cached is not None and plan.cached != self.autocache.boundary:
            self._advance(plan.cached, at_start=self.step == 0)
        self.autopipe.entered()

    def _with_cache(self, plan: ParallelPlan, *, at_start: bool) -> ParallelPlan:
        """Reserves the cache's memory. Returns ``plan``, with the cache as it is if the memory is declined."""
        cache, by_block, declined = self.autocache, plan.prefix == "streamed", ""
        if plan.cached is not None:
            declined = cache.reserve(plan.cached, by_block=by_block, at_start=at_start)
        if declined:
            plan = plan.cached_before(cache.boundary)
        if plan.frozen and (declined or cache.declined):
            self._tell(events.CacheDeclined(self.step, declined or cache.declined, plan.cached))
        return plan

    def _advance(self, boundary: int, *, at_start: bool, is_refill: bool = False) -> None:
        HERE.enter("cache advance")
        cache, lent = self.autocache, self.engine.autodp.lent
        advance = cache.advance(boundary, lent=lent, by_block=self.engine.plan.prefix == "streamed", at_start=at_start)
        self._tell(events.Advanced(self.step, boundary, advance, cache.num_bytes, cache.tier, is_refill))

    # ---- training and evaluation -----------------------------------------------------------------------------------

    def _train(self, *, stop: int) -> None:
        """Runs the optimizer steps up to ``stop``, all in one epoch."""
        position = self.step % self.calendar.batches_per_epoch
        batches = self.job.train_batches(self.epoch)[position:]
        self.step = self.steps.run(batches, first_step=self.step, num_steps=stop - self.step)

    def _evaluate(self) -> None:
        """Evaluates every split but ``train``. Saves the model if it is the best so far."""
        HERE.enter("evaluation")
        start = perf_counter()
        metrics = self.guards.evaluate(last_step=self.step - 1)
        seconds, epoch = perf_counter() - start, self.calendar.epoch(max(0, self.step - 1))
        predictions = self.job.datasets["eval"].predictions
        self._tell(events.Evaluated(self.step, epoch, metrics, seconds, predictions))
        if self.report.totals.best_metrics is metrics:
            try:
                self._save_model("best")
            except UserError as error:
                self._tell_unsaved("the best model", error, step=self.step)

    # ---- beginning and saving --------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Enters the first plan, or the plan of the resumed checkpoint. A refused job leaves no trace."""
        self._announce(lines.of_data(self.job.datasets, label_names=self.job.label_names))
        HERE.enter("measuring")
        self._announce(*self.job.precision.lines())
        probed, origin = self._probe(), self.origin
        if self.timed:
            if self.config.pipe.measure and self.calendar.total_steps:
                self._announce("measuring the model's units and the step time of every static layout ...")
            batches, done = self.job.train_batches(0), int(origin.state.get("step", 0))
            spent, disk_ns = self.job.precision.seconds, self.autocache.disk_ns()
            self.autopipe.measure(self.engine, batches, first_step=done, spent_seconds=spent, disk_ns=disk_ns)
        self.step, choice = origin.enter(self.engine, autofreeze=self.autofreeze, autopipe=self.autopipe)
        if self.autofreeze.rests and not origin.replayed:
            self.engine.rest()
        agree("start", (self.step, self.engine.plan, self.job.train_digest(self.epoch)))
        self._tell(events.Opened())
        plan = self._with_cache(self.engine.plan, at_start=origin.cached_at_start)
        if plan != self.engine.plan:
            self.engine.enter(plan)
        if self.timed:
            self._tell(events.Measured(self.autopipe.layouts, self.autopipe.profile))
        if origin.checkpoint is not None:
            damaged = tuple(self.checkpoints.damaged)
            self._tell(events.Resumed(self.step, origin.checkpoint.name, origin.state["report"], damaged))
        if probed is not None:
            self._tell(probed)
        self._tell(events.Adopted(self.step, plan, "resume" if origin.checkpoint else "start", choice))
        for boundary in origin.refill_path(plan.cached):
            self._advance(boundary, at_start=origin.cached_at_start, is_refill=True)
        reset_peak_memory(self.world.device)
        outlook = partial(self.autofreeze.outlook, wants_guard=self.config.freeze.is_guarded)
        freezing = Freezing() if origin.replayed else outlook(self.step, frozen=plan.frozen)
        self._tell(events.TrainingStarts(plan, freezing))

    def _probe(self) -> events.Probed | None:
        """Fits linear heads at every boundary, where AutoFreeze or the user wants them, while all weights are here."""
        is_wanted = (self.autofreeze.needs_probe and self.calendar.total_steps > 0) or self.config.freeze.probe
        if not is_wanted or self.origin.checkpoint is not None or self.origin.replayed:
            return None
        return probe_job(self.job, self.autofreeze, world=self.world)

    def _save_checkpoint(self, *, wait: bool = False) -> bool:
        """Begins a checkpoint, when the one before is written. Returns whether it is written too, for whom waits."""
        self._hear_of_checkpoint(wait=True)
        agree("checkpoint", (self.step, self.engine.plan))
        state = {
            "freeze": self.autofreeze.state_dict(),
            "cache": self.autocache.path,
            "cached_at_start": self.autocache.is_of_start,
            "precision": self.config.train.precision,
            "report": self.report.state_dict(),
        }
        self.checkpoints.begin(self.step, engine=self.engine, state=state)
        return self._hear_of_checkpoint(wait=wait)

    def _hear_of_checkpoint(self, *, wait: bool) -> bool:
        """Tells the end of a checkpoint that was begun. Returns whether there was one, and it could be written."""
        outcome = self.checkpoints.writer.outcome(wait=wait)
        if outcome is None:
            return False
        if outcome.error is not None:
            self._tell_unsaved("the checkpoint", outcome.error, step=outcome.step)
            return False
        self._tell(events.Saved(outcome.step, str(outcome.path), outcome.seconds, outcome.write_seconds))
        return True

    def _tell_unsaved(self, what: str, error: UserError, *, step: int) -> None:
        good = self.checkpoints.latest()
        self._tell(events.NotSaved(step, what, str(error), None if good is None else good.name))

    def _end_early(self) -> None:
        """Saves, and ends the job as the signal that a rank has got would."""
        if self.config.checkpoint.every is None:
            outcome = "nothing is saved, because checkpoint.every is null"
        elif self._save_checkpoint(wait=True):
            outcome = f"step {self.step} is saved; go on with run.id={self.report.folder.run_id} run.resume=true"
        else:
            outcome = f"step {self.step} could not be saved"
        self._tell(events.EndsEarly(self.step, outcome))
        raise Interrupted(SIGTERM, outcome, is_ours=is_told())

    def _save_model(self, name: str) -> None:
        if self.config.model.save not in ("both", name):
            return
        HERE.enter("model save")
        folder = self.report.folder.path / "model" / name
        given_to(0, self.engine.weights(), lambda units: save_model(self.job.built, folder, units))

    # ---- helpers ---------------------------------------------------------------------------------------------------

    def _announce(self, *told: str) -> None:
        self._tell(events.Announced(told))

    def _tell(self, event: events.Event) -> None:
        for listener in self.listeners:
            listener(event)

    def _decision_is_due(self, step: int) -> bool:
        """Whether a replay has a plan for ``step``, or AutoFreeze decides at it."""
        return step in self.origin.replayed or self.autofreeze.due(step)

    @property
    def epoch(self) -> int:
        """The epoch that the next step belongs to, from 0."""
        return self.calendar.epoch(self.step)
