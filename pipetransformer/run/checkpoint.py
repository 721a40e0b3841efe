"""Checkpoints by parameter name, complete or invisible; and the whole model gathered for its own library's format.

checkpoints/step-00000120/    weights and optimizer state (DCP: each tensor written once, by one of its holders)
                state.json    everything else: the plan, progress, the policy's memory, totals
checkpoints/step-00000120.part/   while it is written; renamed when all ranks are done
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipetransformer.adapter import CheckpointException, load_tensors, save_tensors
from pipetransformer.dp import execute_transfers, plan_transfers
from pipetransformer.dp.optimizer_state import OptimizerState, empty_state
from pipetransformer.engine.layout import Layout, Ownership
from pipetransformer.errors import UserError, writing
from pipetransformer.models import BuiltModel, Chain
from pipetransformer.plan import ParallelPlan
from pipetransformer.plan.units import Numbering
from pipetransformer.process.shutdown import register
from pipetransformer.process.world import World

if TYPE_CHECKING:
    from pipetransformer.config import TrainConfig
    from pipetransformer.data import Dataset

__all__ = ["CheckpointStore", "gather_weights", "job_identity", "save_model"]

_PART = ".part"


def job_identity(train: TrainConfig, *, total_steps: int, num_nodes: int, training_data: Dataset) -> dict[str, object]:
    """What must not change between a checkpoint and its resumption: samples would be skipped or seen twice, or the
    optimizer's state would mean nothing."""
    return {
        "steps": total_steps,
        "train.seed": train.seed,
        "train.batch_size": train.batch_size,
        "train.optimizer": train.optimizer,
        "nodes": num_nodes,
        "training data": training_data.fingerprint,
    }


class CheckpointStore:
    """The checkpoints of one run. All methods are collective unless they say otherwise."""

    def __init__(self, folder: Path, *, world: World, keep: int) -> None:
        self.folder = folder
        self._world = world
        self._keep = keep

    def latest(self) -> Path | None:
        """The last complete checkpoint. Not collective."""
        return next(reversed(self._complete()), None)

    def _complete(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("step-*") if not path.name.endswith(_PART))

    def save(self, step: int, *, layout: Layout, chain: Chain, ownership: Ownership, state: Mapping[str, Any]) -> Path:
        """Writes one checkpoint and deletes those that are too many.

        Args:
            state: what can be written as JSON; comes back from ``resumable``.
        """
        rank = self._world.rank
        final = self.folder / f"step-{step:08d}"
        part = final.with_name(final.name + _PART)
        unregister = register(lambda: _discard(part))
        try:
            if rank == 0:
                for left_behind in self.folder.glob(f"*{_PART}"):
                    shutil.rmtree(left_behind, ignore_errors=True)
                with writing(part):
                    part.mkdir(parents=True)
            dist.barrier()
            try:
                save_tensors(self._owned_tensors(layout, chain, ownership), part, is_alone=self._world.size == 1)
            except CheckpointException as error:
                raise UserError(f"checkpoint: {part} could not be written ({_first_failure(error)})") from error
            if rank == 0:
                holders = {str(unit): sorted(ranks) for unit, ranks in layout.state_holders(ownership).items()}
                record = {"plan": layout.plan.as_dict(), "state_holders": holders, **state}
                with writing(part), (part / "state.json").open("w") as file:
                    json.dump(record, file)
                    file.flush()
                    os.fsync(file.fileno())
                _discard(final)
                with writing(final):
                    part.rename(final)
                for old in self._complete()[: -self._keep]:
                    _discard(old)
            dist.barrier()
        finally:
            _discard(part)
            unregister()
        return final

    def _owned_tensors(self, layout: Layout, chain: Chain, ownership: Ownership) -> dict[str, Tensor]:
        """What this rank writes: each weight and state is written by the lowest rank that holds it."""
        rank = self._world.rank
        state = {**ownership.parked, **layout.state()}
        tensors: dict[str, Tensor] = {}
        for unit, ranks in ownership.weights.items():
            if rank == min(ranks):
                tensors |= {f"model.{n}": p.detach() for n, p in chain.named_parameters([unit]).items()}
        for unit, ranks in layout.state_holders(ownership).items():
            if rank == min(ranks):
                for name in chain.named_parameters([unit]):
                    tensors |= {f"optimizer.{name}.{key}": value for key, value in state[name].items()}
        return tensors

    def resumable(self, *, identity: Mapping[str, object], numbering: Numbering) -> tuple[Path, dict[str, Any]]:
        """The last complete checkpoint and its JSON part, in the units of ``numbering``. Not collective.

        Raises:
            UserError: if there is none, or if it belongs to another job (what ``identity`` says of it was saved with
                it), another number of ranks or of blocks, or if its plan cuts blocks that are to be whole.
        """
        path = self.latest()
        if path is None:
            raise UserError(
                f"run.resume: {self.folder.parent} holds no complete checkpoint; "
                "start it anew with run.overwrite=true and run.resume=false"
            )
        try:
            state = dict(json.loads((path / "state.json").read_text()))
            plan, saved = ParallelPlan.from_dict(state["plan"]), dict(state["identity"])
            for key in ("step", "freeze", "cache", "report", "state_holders"):
                state[key]
        except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
            said = f"{type(error).__name__}: {error}"
            raise UserError(f"run.resume: {path / 'state.json'} cannot be read ({said}); delete {path}") from error
        for given, here, what, remedy in (
            (plan.world_size, self._world.size, "ranks", f"start it with {plan.world_size}"),
            (plan.num_blocks, numbering.num_blocks, "blocks", "give the same model"),
            *(
                (saved.get(key), value, key, "give the same data, seed, batch size, epochs, optimizer and nodes")
                for key, value in identity.items()
            ),
        ):
            if given != here:
                raise UserError(f"run.resume: {path} is of a run with {what} {given} and this one has {here}; {remedy}")
        renumbered = plan.renumbered(numbering.units_per_block)
        if renumbered is None:
            raise UserError(f"run.resume: the plan of {path} cuts blocks in halves; give pipe.units=half")
        state["plan"] = renumbered.as_dict()
        state["state_holders"] = _renumbered(state["state_holders"], old=plan.numbering, new=numbering)
        return path, state

    def load(
        self, path: Path, *, state: Mapping[str, Any], chain: Chain, train: TrainConfig, ownership: Ownership
    ) -> tuple[ParallelPlan, OptimizerState]:
        """Fills the chain (whole on every rank) and ``ownership``; returns the plan and this rank's optimizer state.

        Raises:
            UserError: if the checkpoint belongs to another model or optimizer.
        """
        plan = ParallelPlan.from_dict(state["plan"])
        world = self._world
        holders = {int(unit): frozenset(ranks) for unit, ranks in state["state_holders"].items()}
        needed = [u for u in range(plan.num_units) if u < plan.first_active or u in plan.units_of(world.rank)]
        parameters = chain.named_parameters(needed)
        mine = [unit for unit, ranks in holders.items() if world.rank in ranks]
        optimizer_state = {
            name: empty_state(train, parameter, device=chain.device)
            for name, parameter in chain.named_parameters(mine).items()
        }
        tensors: dict[str, Any] = {f"model.{name}": p.data for name, p in parameters.items()}
        for name, entries in optimizer_state.items():
            tensors |= {f"optimizer.{name}.{key}": value for key, value in entries.items()}
        try:
            load_tensors(tensors, path, is_alone=self._world.size == 1)
        except CheckpointException as error:
            raise UserError(
                f"run.resume: {path} does not fit this configuration, or is damaged ({_first_failure(error)}); "
                "give the same model, or delete it"
            ) from error
        ownership.state = holders
        active = set(plan.units_of(world.rank))
        for unit in mine:
            if unit not in active:
                ownership.parked |= {name: optimizer_state.pop(name) for name in chain.named_parameters([unit])}
        return plan, optimizer_state


def _renumbered(holders: Mapping[str, list[int]], *, old: Numbering, new: Numbering) -> dict[str, list[int]]:
    """The holders of a part's units, for each of its new units: everything is loaded by name, whoever wrote it."""
    of_part: dict[int, set[int]] = {}
    for unit, ranks in holders.items():
        of_part.setdefault(old.part_of(int(unit)), set()).update(ranks)
    parts = ((unit, new.part_of(unit)) for unit in range(new.num_units))
    return {str(unit): sorted(of_part[part]) for unit, part in parts if part in of_part}


def _discard(folder: Path) -> None:
    """Deletes ``folder`` if it is there still, whatever other ranks do with it meanwhile.

    Renamed first, it is found by no rank that would write into it, and half deleted it is no complete checkpoint.
    """
    doomed = folder.with_name(f"{folder.stem}.{os.getpid()}{_PART}")
    unregister = register(lambda: shutil.rmtree(doomed, ignore_errors=True))
    try:
        with contextlib.suppress(OSError):
            folder.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)
    finally:  # a signal may have come between
        shutil.rmtree(doomed, ignore_errors=True)
        unregister()


def _first_failure(error: CheckpointException) -> str:
    """Note: torch makes this a BaseException, which passes ``except Exception``, and its text is many lines long."""
    rank, (cause, _) = min(error.failures.items())
    return f"rank {rank}: {type(cause).__name__}: {' '.join(str(cause).split())[:200]}"


def gather_weights(chain: Chain, ownership: Ownership, *, world: World) -> dict[str, Tensor] | None:
    """Collective. Every parameter and persistent buffer by name, on the CPU of rank 0; None on the others."""
    needed = dict.fromkeys(ownership.weights, frozenset({0}))
    transfers = plan_transfers(ownership.weights, needed, ranks_per_node=world.local_size)
    arriving = {t.unit for t in transfers} if world.rank == 0 else set()
    gathered: dict[str, Tensor] = {}
    for unit in ownership.weights:
        for name, parameter in chain.named_parameters([unit]).items():
            if unit in arriving:
                gathered[name] = torch.empty(parameter.shape, dtype=parameter.dtype, device=chain.device)
            elif not parameter.is_meta:
                gathered[name] = parameter.detach()
    names = {unit: list(chain.named_parameters([unit])) for unit in ownership.weights}
    execute_transfers(transfers, rank=world.rank, tensors=lambda unit: (gathered[name] for name in names[unit]))
    if world.rank != 0:
        return None
    buffers = {n: b for n, b in chain.model.state_dict().items() if n not in gathered}
    return {name: tensor.cpu() for name, tensor in {**gathered, **buffers}.items()}


def _give_usual_permissions(folder: Path) -> None:
    """Note: safetensors makes files that only their owner can read, whatever the umask says."""
    umask = os.umask(0)
    os.umask(umask)
    for path in folder.rglob("*"):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)


def save_model(built: BuiltModel, folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Writes the model in its own library's format; a reader sees the old folder or the whole new one.

    Not collective: rank 0 alone calls it.
    """
    part, old = folder.with_name(folder.name + _PART), folder.with_name(folder.name + ".old")

    def tidy() -> None:
        if old.exists() and not folder.exists():
            old.rename(folder)
        for path in (part, old):
            shutil.rmtree(path, ignore_errors=True)

    unregister = register(tidy)
    try:
        tidy()
        with writing(folder):
            part.mkdir(parents=True)
            built.save(part, weights)
            _give_usual_permissions(part)
            if folder.exists():
                folder.rename(old)
            part.rename(folder)
    finally:
        tidy()
        unregister()
