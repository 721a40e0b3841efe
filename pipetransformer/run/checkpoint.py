"""Checkpoints by parameter name: what is in them, and back. ``writing.py`` brings them to the disk."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from pipetransformer.adapter import CheckpointException, load_tensors
from pipetransformer.dp import Holders, OptimizerState
from pipetransformer.engine import Engine
from pipetransformer.errors import UserError
from pipetransformer.plan import ParallelPlan
from pipetransformer.plan.units import Numbering
from pipetransformer.process.collectives import led_by, patiently, values_of_ranks
from pipetransformer.process.whereabouts import HERE
from pipetransformer.process.world import World
from pipetransformer.run.checksums import damage_of, files_of
from pipetransformer.run.folder import complete_checkpoints
from pipetransformer.run.writing import CheckpointWriter, first_failure

if TYPE_CHECKING:
    from pipetransformer.config import Config
    from pipetransformer.config.calendar import Calendar
    from pipetransformer.run.job import Job


_VERSION = 2
_OLDER = {"model.dtype": "float32", "train.ema": False}  # what is not noted in checkpoints of older versions
_SAME = (
    "give the same model, data, seed, batch size, optimizer, freeze.guard, freeze.guard_samples and cache.views; with "
    "other train.epochs or train.max_steps, the guard may set other samples aside"
)


class CheckpointStore:
    """The checkpoints of one run. All methods are collective unless they say otherwise.

    Args:
        run_dir: folder of the run.

    Attributes:
        folder: the folder of all checkpoints of the run.
        damaged: those that ``resumable`` passed over, each with the reason.
        writer: brings them to the disk.
    """

    def __init__(self, config: Config, *, run_dir: Path, job: Job, calendar: Calendar, world: World) -> None:
        train, self._calendar = config.train, calendar
        self.folder, self.damaged = run_dir / "checkpoints", list[str]()
        self._world, self._stem, self._averaged = world, config.freezes_stem, config.freeze.is_averaged
        options = config.checkpoint
        # On a CPU, the copy that a write beside training needs would lie where the limit counts.
        is_limited = world.device.type == "cpu" and config.pipe.memory_limit is not None
        beside = options.asynchronous and not is_limited
        self.writer = CheckpointWriter(self.folder, keep=options.keep, beside=beside, world=world)
        # Facts that must not change before a resumption: samples would be skipped or seen twice, or the optimizer's
        # state would have no meaning.
        self._identity: dict[str, object] = {
            "batches of an epoch": calendar.batches_per_epoch,
            "train.seed": train.seed,
            "train.batch_size": train.batch_size,
            "train.optimizer": train.optimizer,
            "train.ema": train.ema is not None,
            "nodes": world.began_on,
            "model.dtype": config.model.dtype,
            "model.lora": None if config.model.lora is None else config.model.lora.model_dump(mode="json"),
            "training data": job.datasets["train"].fingerprint,
        }

    def latest(self) -> Path | None:
        """The last complete checkpoint. Not collective."""
        return next(reversed(self._complete()), None)

    def _complete(self) -> list[Path]:
        return complete_checkpoints(self.folder.parent)

    def begin(self, step: int, *, engine: Engine, state: Mapping[str, Any]) -> None:
        """Begins to write one checkpoint; ``writer`` tells its end.

        Args:
            step: number of steps done.
            state: further values that JSON can hold, by name; ``resumable`` gives them back, with the step.
        """
        HERE.enter("checkpoint write")
        record = {
            "version": _VERSION,
            "plan": engine.plan.as_dict(),
            "state_ranges": {str(unit): _ends(ranks) for unit, ranks in engine.state_holders().items()},
            "identity": self._identity,
            "averaged": self._averaged,
            "untouched": engine.untouched,
            "step": step,
            "loss_scale": None if (scale := engine.stepper.loss_scale) is None else scale.state_dict(),
            **state,
        }
        self.writer.begin(step, self._owned_tensors(engine), record)

    def _owned_tensors(self, engine: Engine) -> dict[str, Tensor]:
        """The tensors that this rank writes, by name. Their holders take turns, unit by unit."""
        rank, chain = self._world.rank, engine.chain
        state = {**engine.autodp.parked, **engine.layout.state()}
        tensors: dict[str, Tensor] = {}
        for unit in range(chain.num_units):
            if rank == engine.autodp.written_by(unit):
                with chain.lent([unit]):
                    tensors |= {f"model.{n}": p.detach() for n, p in chain.named_parameters([unit]).items()}
        for unit, ranks in engine.state_holders().items():
            if rank == ranks[unit % len(ranks)]:
                for name in chain.trained_parameters([unit]):
                    tensors |= {f"optimizer.{name}.{key}": value for key, value in state[name].items()}
        return tensors

    def resumable(self, *, numbering: Numbering) -> tuple[Path, dict[str, Any]]:
        """Collective. The last complete checkpoint whose files are as they were written, and its JSON part.

        Its plan and holders are in the units of ``numbering``; they may be those of another number of ranks.

        Raises:
            UserError: if there is none; if it belongs to another job (by its saved identity), or to another
                number of blocks, or lies behind the last step; or if its plan cuts blocks that are whole in
                ``numbering``.
        """
        path = self._latest_whole()
        try:
            state = dict(json.loads((path / "state.json").read_text()))
            if (version := state.get("version", 1)) != _VERSION:
                raise UserError(
                    f"run.resume: {path} is a checkpoint of version {version} and this one reads {_VERSION}; finish "
                    "the run with the release of pipetransformer that began it"
                )
            plan, saved = ParallelPlan.from_dict(state["plan"]), dict(state["identity"])
            holders = {int(unit): range(*ends) for unit, ends in state["state_ranges"].items()}
            for key in ("freeze", "cache", "report"):
                state[key]
            step, averaged = int(state["step"]), bool(state.get("averaged", False))  # older ones had none
        except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
            said = f"{type(error).__name__}: {error}"
            raise UserError(f"run.resume: {path / 'state.json'} cannot be read ({said}); delete {path}") from error
        for given, here, what, remedy in (
            (plan.num_blocks, numbering.num_blocks, "blocks", "give the same model"),
            *((saved.get(key, _OLDER.get(key)), value, key, _SAME) for key, value in self._identity.items()),
            (averaged, self._averaged, "freeze.averaged", f"give freeze.averaged={str(averaged).lower()}"),
            (plan.stem_frozen, self._stem, "freeze.stem", f"give freeze.stem={str(plan.stem_frozen).lower()}"),
        ):
            if given != here:
                raise UserError(f"run.resume: {path} is of a run with {what} {given} and this one has {here}; {remedy}")
        if step > self._calendar.total_steps:
            epochs = -(-step // self._calendar.batches_per_epoch)
            raise UserError(f"train.epochs: {path} has {step} steps behind it; give at least {epochs}")
        renumbered = plan.renumbered(numbering.units_per_block)
        if renumbered is None:
            raise UserError(f"run.resume: the plan of {path} cuts blocks in halves; give pipe.units=half")
        state["plan"] = renumbered
        state["state_holders"] = _renumbered(holders, old=plan.numbering, new=numbering)
        untouched = plan.numbering.part_of(int(state.get("untouched", 0)))  # older ones do not tell
        state["untouched"] = numbering.first_of(untouched)
        return path, state

    def _latest_whole(self) -> Path:
        """The ranks share the files of each checkpoint, from the last one back."""
        names = led_by(0, lambda: [path.name for path in self._complete()])  # nodes may see other ones
        if not names:
            raise UserError(
                f"run.resume: {self.folder.parent} holds no complete checkpoint; "
                "start it anew with run.overwrite=true and run.resume=false"
            )
        last = self.folder / names[-1]
        if not all(values_of_ranks(last.is_dir())):
            raise UserError(f"run.resume: node 0 alone sees {last}; give a run.dir that all nodes share")
        for path in (self.folder / name for name in reversed(names)):
            digests, why_not = files_of(path)
            mine = dict(list(digests.items())[self._world.rank :: self._world.size])
            damage = patiently(partial(damage_of, path, mine))
            found = next(filter(None, values_of_ranks(why_not or damage)), "")
            if not found:
                return path
            self.damaged.append(f"{path.name}: {found}")
        raise UserError(
            f"run.resume: {self.folder} holds no checkpoint that is whole ({'; '.join(self.damaged)}); "
            "start it anew with another run.id"
        )

    def load(self, path: Path, *, state: Mapping[str, Any], engine: Engine) -> OptimizerState:
        """Reads the weights into the engine's chain, and gives the holders of optimizer state to AutoDP.

        Args:
            path: the folder of the checkpoint.
            state: its other part, from ``resumable``.

        Returns:
            This rank's optimizer state by parameter name, that of frozen units included.

        Raises:
            UserError: if the checkpoint belongs to another model or optimizer, or is damaged.
        """
        plan: ParallelPlan = state["plan"]
        if engine.stepper.loss_scale is not None and (kept := state.get("loss_scale")):
            engine.stepper.loss_scale.load_state_dict(kept)
        optimizer_state = engine.autodp.restore(plan, state["state_holders"], untouched=state["untouched"])
        held = [unit for unit, ranks in engine.autodp.weights.items() if self._world.rank in ranks]
        parameters = engine.chain.named_parameters(held)
        tensors: dict[str, Any] = {f"model.{name}": p.data for name, p in parameters.items()}
        for name, entries in optimizer_state.items():
            tensors |= {f"optimizer.{name}.{key}": value for key, value in entries.items()}
        try:
            load_tensors(tensors, path, is_alone=self._world.size == 1)
        except CheckpointException as error:
            raise UserError(
                f"run.resume: {path} does not fit this configuration, or is damaged ({first_failure(error)}); "
                "give the same model, or delete it"
            ) from error
        return optimizer_state


def _ends(ranks: range) -> tuple[int, int, int]:
    return ranks.start, ranks.stop, ranks.step


def _renumbered(holders: Holders, *, old: Numbering, new: Numbering) -> dict[int, range]:
    """Holders by unit, in another numbering: each new unit gets the holders of the first old unit of its part.

    This is enough, because tensors are loaded by name: any rank can read what any other rank has written.
    """
    of_part: dict[int, range] = {}
    for unit, ranks in holders.items():
        of_part.setdefault(old.part_of(unit), ranks)
    parts = ((unit, new.part_of(unit)) for unit in range(new.num_units))
    return {unit: of_part[part] for unit, part in parts if part in of_part}
