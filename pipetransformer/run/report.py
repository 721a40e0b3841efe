"""What a run tells and leaves: events, live figures, totals and the summary. All decisions are taken elsewhere."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import IO, Any

import torch
import torch.distributed as dist

from pipetransformer.cache import Advance
from pipetransformer.config import Config
from pipetransformer.engine.executor import StepInput
from pipetransformer.engine.layout import Move
from pipetransformer.engine.objective import Objective
from pipetransformer.engine.step import PhaseSeconds
from pipetransformer.freeze import FreezeDecision
from pipetransformer.pipe.measure.static_layouts import Calibration
from pipetransformer.plan import ParallelPlan
from pipetransformer.process.device import peak_memory_bytes
from pipetransformer.process.world import World
from pipetransformer.run.compute_floor import ComputeFloor
from pipetransformer.run.folder import RunFolder, make_run_folder
from pipetransformer.run.totals import Totals
from pipetransformer.run.tracking import (
    CacheBytes,
    CacheUse,
    Summary,
    Tracker,
    Transition,
    evaluation_metrics,
    train_metrics,
)

__all__ = ["Report"]


class Report:
    """One rank's part in telling the run's story; rank 0 writes it.

    Attributes:
        folder: where the run's files go. totals: what has been added up so far.

    Nothing is written before ``open``.
    """

    def __init__(
        self, config: Config, world: World, *, folder: RunFolder, total_steps: int, started: float, best_by: str
    ) -> None:
        self.folder = folder
        self.totals = Totals()
        self.resumed_from: str | None = None
        self._config, self._world, self._total_steps = config, world, total_steps
        self._started = started
        self._best_by = best_by
        self._floor: ComputeFloor | None = None
        self._hits = self._misses = 0
        self._since_steps = 0
        self._wall_before = 0.0
        self._has_declined = False
        self._held = (0, 0)
        self._lock: IO[str] | None = None
        self._last_transition_s = 0.0
        self.tracker = Tracker(None)

    def open(self) -> None:
        """Collective. Makes the run's folder and starts to write."""
        config, folder = self._config, self.folder
        self._lock = make_run_folder(folder, config)
        self.tracker = Tracker.for_rank(
            self._world.rank,
            run_dir=folder.path,
            run_id=folder.run_id,
            wandb=config.log.wandb,
            project=config.log.project,
            name=config.log.name,
            config=config.model_dump(mode="json"),
            resumed=folder.is_resumed,
        )

    def calibrated(self, calibration: Calibration) -> None:
        """Tells what was measured and starts the compute floor from it."""
        measured = calibration.measurements
        self._floor = ComputeFloor(
            step_seconds=calibration.floor_seconds,
            costs=measured.by_length,
            timed_samples=calibration.timed_samples,
            world_size=self._world.size,
            memcpy_bytes_per_second=measured.memcpy_bytes_per_second,
        )
        told = ", ".join(
            f"pp {pp} x dp {plan.dp} (M {plan.num_microbatches}) {calibration.mean_seconds[pp] * 1e3:.0f} ms"
            for pp, plan in calibration.static_plans.items()
        )
        self.tracker.line(f"static layouts, a full step of mean length: {told}; best is pp {calibration.best_pp}")
        self.tracker.event(
            "calibration",
            static_seconds=calibration.static_seconds,
            static_plans={pp: plan.as_dict() for pp, plan in calibration.static_plans.items()},
            best_pp=calibration.best_pp,
            corrections=calibration.corrections,
            unit_costs=measured.by_length,
            job_costs=measured.job,
        )

    def trains(self, plan: ParallelPlan) -> None:
        """Set-up is over."""
        self.totals.setup_s += perf_counter() - self._started
        config = self._config
        come_from = f"from {self.resumed_from}" if self.resumed_from else "from the start"
        self.tracker.event(
            "run",
            run_id=self.folder.run_id,
            world_size=self._world.size,
            plan=plan.as_dict(),
            total_steps=self._total_steps,
            resumed_from=self.resumed_from,
        )
        self.tracker.line(
            f"run {self.folder.run_id}: {config.model.name} ({plan.num_blocks} blocks) on {config.data.name}, "
            f"{self._total_steps} steps {come_from} with pp {plan.pp} x dp {plan.dp}, M {plan.num_microbatches}"
            f"{' (pipe.initial_length)' if isinstance(config.pipe.initial_length, int) else ''}, "
            f"{plan.frozen} blocks frozen; set-up took {self.totals.setup_s:.1f} s"
        )

    def measures(self) -> None:
        """Set-up's longest part begins."""
        if self._world.rank == 0:
            print("measuring the model's units and the step time of every static layout ...", flush=True)

    def never_freezes(self) -> None:
        """The policy is not asked once in this run."""
        self.tracker.line(
            "nothing will freeze: freeze.warmup, freeze.every and freeze.patience leave too few decisions in this run"
        )

    def decided(self, decision: FreezeDecision) -> None:
        """AutoFreeze was asked."""
        self.tracker.event("freeze_decision", **asdict(decision))

    def adopts(self, step: int, plan: ParallelPlan, *, reason: str, evidence: dict[str, Any]) -> None:
        """A plan is taken: the event that ``run.replay`` reads, with what speaks for it."""
        self.tracker.event("plan", step=step, plan=plan.as_dict(), reason=reason, **evidence)

    def moved(self, step: int, epoch: int, old: ParallelPlan, plan: ParallelPlan, move: Move, *, reason: str) -> None:
        """A transition during training has been made."""
        self.totals.add_train(move.seconds)
        self.totals.transition_s += move.seconds
        self._last_transition_s = move.seconds
        self.totals.transitions.append(
            Transition(
                step=step,
                epoch=epoch,
                frozen=plan.frozen,
                pp=plan.pp,
                dp=plan.dp,
                microbatches=plan.num_microbatches,
                boundaries=plan.boundaries,
                seconds=move.seconds,
                bytes_moved=move.num_bytes,
                reason=reason,
            )
        )
        self.tracker.event(
            "transition",
            step=step,
            epoch=epoch,
            plan=plan.as_dict(),
            seconds=move.seconds,
            bytes_moved=move.num_bytes,
            reason=reason,
        )
        self.tracker.line(
            f"step {step}: frozen {old.frozen} -> {plan.frozen}, pp {old.pp} -> {plan.pp}, dp {old.dp} -> {plan.dp}, "
            f"M {old.num_microbatches} -> {plan.num_microbatches}, moved {move.num_bytes / 1e6:.1f} MB "
            f"in {move.seconds:.3f} s ({reason})"
        )

    def held(self, step: int, *, frozen: int, wanted: int, reason: str) -> None:
        """Fewer blocks freeze than AutoFreeze wants."""
        self.tracker.event("held", step=step, frozen=frozen, wanted=wanted, reason=reason)
        if (frozen, wanted) != self._held:
            self._held = (frozen, wanted)
            self.tracker.line(f"step {step}: {frozen} blocks are frozen where AutoFreeze wants {wanted}: {reason}")

    def spent_deciding(self, seconds: float) -> None:
        """What a decision took beside the move and the advance pass: it, too, is a cost of being elastic."""
        self.totals.add_train(seconds)
        self.totals.transition_s += seconds

    def advanced(self, step: int, boundary: int, advance: Advance, *, num_bytes: int, refill: bool) -> None:
        """An advance pass is done; ``refill``: before training goes on from a checkpoint, a part of set-up."""
        self.totals.cache_bytes = max(self.totals.cache_bytes, num_bytes)
        if not refill:
            self.totals.add_train(advance.seconds)
            self.totals.cache_advance_s += advance.seconds
        if self._floor is not None and not refill:
            for (first, length), count in advance.samples.items():
                self._floor.add_advance(length=length, num_samples=count, first=first, stop=advance.stop)
        self.tracker.event(
            "advance", step=step, boundary=boundary, seconds=advance.seconds, samples=advance.num_samples
        )
        self.tracker.line(
            f"step {step}: cached {advance.num_samples} samples at block {boundary} in {advance.seconds:.2f} s "
            f"({num_bytes / 1e6:.0f} MB of host memory a node)"
        )

    def declined(self, step: int, reason: str) -> None:
        """There is no cache; told once."""
        if self._has_declined:
            return
        self._has_declined = True
        self.tracker.event("cache_declined", step=step, reason=reason)
        self.tracker.line(f"step {step}: no cache: {reason}; frozen blocks are computed in each step")

    def stepped(self, plan: ParallelPlan, batch: StepInput, *, read_bytes: int) -> None:
        """After each step; ``read_bytes`` were read from the cache for the global batch."""
        if batch.hidden is not None and plan.cached is not None:
            if batch.enters:
                self._hits += batch.num_real
            else:
                self._misses += batch.num_real
        self._since_steps += 1
        if self._floor is not None:
            self._floor.add_step(
                length=batch.length,
                num_samples=batch.global_count,
                first_active=plan.first_active,
                enters=batch.enters,
                read_bytes=read_bytes,
            )

    def progressed(self, step: int, *, epoch: int, plan: ParallelPlan) -> None:
        """Moves the bar; costs a microsecond. The last step is told by ``flush``, with its figures."""
        if step == self._total_steps:
            return
        self.tracker.step(
            step,
            total_steps=self._total_steps,
            epoch=epoch + 1,
            num_epochs=self._config.train.epochs,
            frozen=plan.frozen,
            pp=plan.pp,
            dp=plan.dp,
        )

    def flush(
        self, step: int, *, plan: ParallelPlan, objective: Objective, phases: PhaseSeconds, seconds: float
    ) -> None:
        """Collective. Records the steps since the last flush, which took ``seconds``."""
        if self._since_steps == 0:
            return
        mine = torch.tensor(
            [
                *(float(objective.loss_sum), float(objective.num_correct), float(objective.num_samples)),
                *(float(self._hits), float(self._misses)),
                *phases.as_list(),
            ],
            dtype=torch.float64,
        )
        gathered = [torch.empty_like(mine) for _ in range(self._world.size)]
        dist.all_gather(gathered, mine)
        table = torch.stack(gathered)
        loss_sum, correct, samples, hits, misses = table[:, :5].sum(dim=0).tolist()
        self.totals.hits += int(hits)
        self.totals.misses += int(misses)
        hit_rate = hits / (hits + misses) if hits + misses else None
        by_phase = {n: column.tolist() for n, column in zip(PhaseSeconds.names(), table[:, 5:].T, strict=True)}
        steps, samples = self._since_steps, max(samples, 1.0)
        rate = samples / seconds if seconds else 0.0
        slowest = {name: max(column) / steps for name, column in by_phase.items()}
        self.tracker.event(
            "steps",
            step=step,
            num_steps=steps,
            seconds=seconds,
            loss=loss_sum / samples,
            accuracy=correct / samples,
            samples_per_s=rate,
            hits=int(hits),
            misses=int(misses),
            phase_seconds_by_rank=by_phase,
        )
        metrics = train_metrics(
            loss=loss_sum / samples,
            accuracy=correct / samples,
            samples_per_second=rate,
            synchronisations_per_second=steps / seconds if plan.dp > 1 and seconds else 0.0,
            forward_seconds=slowest["forward"] + slowest["prefix"],
            backward_seconds=slowest["backward"],
            frozen_blocks=plan.frozen,
            pp=plan.pp,
            dp=plan.dp,
            num_microbatches=plan.num_microbatches,
            transition_seconds=self._last_transition_s,
            cache_hit_rate=hit_rate,
        )
        self.tracker.metrics(metrics, step=step)
        fields: dict[str, Any] = {
            "total_steps": self._total_steps,
            "loss": loss_sum / samples,
            "samples_per_second": rate,
        }
        self.tracker.step(step, **fields, **({} if hit_rate is None else {"cache_hit_rate": hit_rate}))
        objective.clear()
        self._hits = self._misses = self._since_steps = 0
        self._last_transition_s = 0.0

    def evaluated(
        self,
        step: int,
        *,
        epoch: int,
        metrics: dict[str, float],
        seconds: float,
        predictions: dict[str, str] | None,
    ) -> bool:
        """Tells an evaluation and returns whether it is the best so far; its predictions take the last one's place."""
        totals, by = self.totals, self._best_by
        totals.eval_s += seconds
        totals.metrics = metrics
        is_best = by not in totals.best_metrics or metrics[by] > totals.best_metrics[by]
        if is_best:
            totals.best_metrics = dict(metrics)
        if predictions is not None:
            self.tracker.predictions(predictions)
        best = totals.best_metrics
        self.tracker.event("evaluation", step=step, epoch=epoch, metrics=metrics, best_metrics=best, seconds=seconds)
        self.tracker.metrics(evaluation_metrics(self._config.task, metrics, best=best), step=step)
        told = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        self.tracker.line(f"step {step}: evaluation {told} (best {by} {best[by]:.4f}), {seconds:.1f} s")
        return is_best

    def saved(self, step: int, path: Path) -> None:
        self.tracker.event("checkpoint", step=step, path=str(path))

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of the report."""
        self.totals.floor_s = self._floor.seconds if self._floor is not None else 0.0
        self.totals.wall_s = self._wall_seconds()
        return self.totals.state_dict()

    def restore(self, state: dict[str, Any], *, step: int, resumed_from: str) -> None:
        """Goes on from a checkpoint's totals, and tells what the configuration says otherwise than it did."""
        self.tracker.event("resume", step=step, resumed_from=resumed_from, changes=self.folder.changes)
        for change in self.folder.changes:
            self.tracker.line(f"resumed with another setting: {change}")
        self.totals = Totals.from_state_dict(state)
        self.resumed_from = resumed_from
        self._wall_before = self.totals.wall_s
        if self._floor is not None:
            self._floor.seconds = self.totals.floor_s

    def _wall_seconds(self) -> float:
        return self._wall_before + perf_counter() - self._started

    def finish(self, *, steps: int) -> None:
        """Collective. Writes and shows the summary."""
        config, totals = self._config, self.totals
        peaks = [0] * self._world.size
        dist.all_gather_object(peaks, peak_memory_bytes(self._world.device))
        summary = Summary(
            run_id=self.folder.run_id,
            task=config.task,
            model=config.model.name,
            dataset=config.data.name,
            world_size=self._world.size,
            epochs=config.train.epochs,
            steps=steps,
            global_batch_size=config.train.batch_size,
            seed=config.train.seed,
            metrics=totals.metrics,
            best_metrics=totals.best_metrics,
            wall_s=self._wall_seconds(),
            train_s=totals.train_s,
            eval_s=totals.eval_s,
            transition_s=totals.transition_s,
            cache_advance_s=totals.cache_advance_s,
            setup_s=totals.setup_s,
            samples_per_s=tuple(totals.samples_per_s),
            peak_memory_bytes=tuple(peaks),
            transitions=tuple(totals.transitions),
            cache=CacheUse(hits=totals.hits, misses=totals.misses, bytes=CacheBytes(host=totals.cache_bytes)),
            compute_floor_s=self._floor.seconds if self._floor is not None else 0.0,
            resumed_from=self.resumed_from,
        )
        self.tracker.event("end", step=steps, metrics=totals.metrics, train_s=totals.train_s)
        self.tracker.summarise(summary)

    def close(self, exit_code: int) -> None:
        self.tracker.close(exit_code=exit_code)
        if self._lock is not None:
            self._lock.close()
