"""What happens once before training: the run's folder, the data, the model, and the checks that need all three."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO

import numpy as np
import torch
import torch.distributed as dist

from pipetransformer.config import Config, load_config
from pipetransformer.data import Dataset, Lead, describe, load_image_data, load_squad, load_text_data
from pipetransformer.errors import UserError, writing
from pipetransformer.models import BuiltModel, Chain, TimmModel, build_model
from pipetransformer.pipe.planner.choice import schedules_of
from pipetransformer.pipe.planner.search import divisors
from pipetransformer.plan import ParallelPlan
from pipetransformer.plan.units import Numbering
from pipetransformer.process.world import World, led_by
from pipetransformer.run.tracking import read_events

__all__ = ["Job", "RunFolder", "build_job", "check_layout", "find_run_folder", "make_run_folder", "read_plans"]

_LOCK = ".lock"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Where a run's files go.

    Attributes:
        is_resumed: it exists and is to be continued. changes: what its configuration said that this one says otherwise,
            of everything that bears on the weights.
    """

    run_id: str
    path: Path
    is_resumed: bool
    changes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Job:
    """What is trained, on what.

    Attributes:
        datasets: by split: ``train``, ``eval`` and, where a task has further evaluation sets, those by their own names.
    """

    built: BuiltModel
    chain: Chain
    datasets: dict[str, Dataset]


def find_run_folder(config: Config) -> RunFolder:
    """Collective. Rank 0 decides the run's id; nothing is written, so that what is refused later leaves no trace.

    Raises:
        UserError: on every rank, if the folder is there and neither resumed nor overwritten, or is not there to resume.
    """
    return led_by(0, lambda: _find_run_folder(config))


def make_run_folder(folder: RunFolder, config: Config) -> IO[str] | None:
    """Collective. Makes the folder that ``find_run_folder`` found, or empties the one that is to be overwritten.

    Returns:
        On rank 0 the lock that keeps other jobs out while it is open.

    Raises:
        UserError: on every rank, if it cannot be written or another job is at work in it.
    """
    locks: list[IO[str]] = []
    led_by(0, lambda: locks.append(_make_run_folder(folder, config)))
    return locks[0] if locks else None


def _find_run_folder(config: Config) -> RunFolder:
    run = config.run
    if run.resume and run.id is None:
        raise UserError("run.resume: which run is not said; give run.id")
    run_id = run.id or datetime.now().strftime("%Y%m%d-%H%M%S")
    path = Path(run.dir).expanduser() / run_id
    try:
        if run.resume and not path.is_dir():
            raise UserError(f"run.resume: there is no run {path}; start it without run.resume")
        if path.exists() and not (run.resume or run.overwrite):
            raise UserError(
                f"run.id: {path} exists; continue it with run.resume=true, delete it with run.overwrite=true, "
                "or give another run id"
            )
        if run.overwrite and path.exists() and not _may_be_deleted(path):
            raise UserError(f"run.overwrite: {path} is not the folder of a run; delete it yourself, or give another id")
        if (path / _LOCK).exists():
            _lock(path).close()
        there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    except OSError as error:
        raise UserError(f"run.dir: {path} cannot be read ({error.strerror})") from error
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        raise UserError(f"run.dir: {path} cannot be made, because {there} is no folder that this user may write to")
    return RunFolder(run_id, path, is_resumed=run.resume, changes=_changes(path, config) if run.resume else ())


def _changes(path: Path, config: Config) -> tuple[str, ...]:
    """One text for every key of model, data, train and freeze that differs from the configuration kept in ``path``."""
    if not (path / "config.yaml").is_file():
        return ()
    old, new = load_config(path / "config.yaml").model_dump(), config.model_dump()
    return tuple(
        f"{section}.{key} was {old[section][key]} and is {value} now"
        for section in ("model", "data", "train", "freeze")
        for key, value in new[section].items()
        if value != old[section][key]
    )


def _may_be_deleted(path: Path) -> bool:
    """Whether an earlier run made ``path``; an empty folder is what a run leaves that was killed at once."""
    return path.is_dir() and ((path / "config.yaml").is_file() or all(p.name == _LOCK for p in path.iterdir()))


def _make_run_folder(folder: RunFolder, config: Config) -> IO[str]:
    with writing(folder.path):
        folder.path.mkdir(parents=True, exist_ok=True)
        lock = _lock(folder.path)
        if config.run.overwrite:
            # Its configuration goes last: the folder of a run is known by it.
            for path in sorted(folder.path.iterdir(), key=lambda path: path.name == "config.yaml"):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                elif path.name != _LOCK:
                    path.unlink()
        # What belongs to this launch alone would do harm where the file is used again.
        kept = {"run.id": folder.run_id, "run.overwrite": False, "run.resume": False, "run.replay": None}
        (folder.path / "config.yaml").write_text(config.with_overrides(kept).to_yaml())
    return lock


def _lock(folder: Path) -> IO[str]:
    """The kernel gives it back when its process ends, however that dies."""
    file = (folder / _LOCK).open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise UserError(f"run.id: another job is at work in {folder}; wait for it, or give another run id") from None
    return file


def build_job(config: Config, world: World, *, lead: Lead) -> Job:
    """Builds model and data, the same on every rank. Raises UserError.

    Args:
        lead: has one rank a node do what serves all of them.
    """
    on_gpu = world.device.type == "cuda"
    if config.train.precision == "bfloat16" and on_gpu and not torch.cuda.is_bf16_supported():
        raise UserError("train.precision: this GPU has no bfloat16; give float32")
    info = lead(lambda: describe(config.data))
    built = build_model(config, info)
    datasets: Mapping[str, Dataset]
    if isinstance(built, TimmModel):
        datasets = load_image_data(
            config.data, info=info, preprocessing=built.preprocessing, seed=config.train.seed, lead=lead
        )
    elif config.task == "question_answering":
        datasets = load_squad(config.data, tokenizer=built.tokenizer, lead=lead)
    else:
        datasets = load_text_data(config.data, info=info, tokenizer=built.tokenizer, lead=lead)
    chain = Chain(
        built.model,
        name=config.model.name,
        precision=config.train.precision,
        device=world.device,
        units_per_block=config.pipe.units_per_block,
    )
    train_data = datasets["train"]
    probe = train_data.inputs(np.arange(1), length=int(train_data.lengths[0]), epoch=0)
    try:
        chain.learn_shapes({key: value.to(world.device) for key, value in probe.items()})
    except UserError:
        raise
    except Exception as error:  # whatever the model makes of inputs that do not fit it
        said = " ".join(str(error).split())[:200]
        shapes = ", ".join(f"{key} {list(value.shape[1:])}" for key, value in probe.items())
        raise UserError(
            f"model.name: {config.model.name} cannot compute on {config.data.name} ({shapes}: {said}); "
            "give model.kwargs that fit the data, or another data.image_size"
        ) from error
    if world.num_nodes > 1:
        _check_agreement(chain, datasets, world=world)
    return Job(built, chain, dict(datasets))


def _check_agreement(chain: Chain, datasets: Mapping[str, Dataset], *, world: World) -> None:
    """Collective. Nodes read files of their own: refuses data or weights that differ. Raises UserError everywhere."""
    weights = hashlib.sha256()
    for parameter in chain.model.parameters():
        weights.update(parameter.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    mine = {f"{split} data": data.fingerprint for split, data in datasets.items()} | {"weights": weights.hexdigest()}
    everyone = [mine] * world.size
    dist.all_gather_object(everyone, mine)
    for rank, theirs in enumerate(everyone):
        for what, digest in theirs.items():
            if digest != everyone[0][what]:
                key = "model.name" if what == "weights" else "data.path"
                raise UserError(
                    f"{key}: node {rank // world.local_size} has other {what} than node 0; give all the same files"
                )


def check_layout(config: Config, *, world_size: int, local_size: int, num_units: int) -> None:
    """Refuses pipeline settings that no layout of this job can have. Raises UserError.

    Args:
        local_size: ranks of a node, which holds whole pipelines.
    """
    pipe, batch_size = config.pipe, config.train.batch_size
    units = f"{num_units} units (stem, {'blocks' if pipe.units == 'block' else 'halves of blocks'}, head)"
    if isinstance(pipe.initial_length, int):
        if local_size % pipe.initial_length:
            allowed = ", ".join(str(d) for d in divisors(local_size))
            whole = (
                "world size" if local_size == world_size else "number of ranks of a node, which holds whole pipelines:"
            )
            raise UserError(
                f"pipe.initial_length: {pipe.initial_length} does not divide the {whole} {local_size}; "
                f"give one of {allowed}"
            )
        if pipe.initial_length > num_units:
            raise UserError(
                f"pipe.initial_length: {pipe.initial_length} exceeds the {units} of the model; give at most {num_units}"
            )
        per_rank = min(stages for _, stages in schedules_of(config))
        if pipe.initial_length > 1 and pipe.initial_length * per_rank > num_units:
            most = num_units // pipe.initial_length
            remedy = f"at most {most}" if most > 1 else "a smaller pipe.initial_length, or pipe.schedule 1f1b"
            raise UserError(
                f"pipe.stages_per_rank: {per_rank} x pipe.initial_length {pipe.initial_length} exceeds the {units} of "
                f"the model; give {remedy}"
            )
    first_dp = world_size // pipe.initial_length if isinstance(pipe.initial_length, int) else 1
    may_grow = config.freeze.policy != "none" and pipe.enabled and config.dp.enabled
    most_dp = world_size if may_grow or pipe.initial_length == "auto" else first_dp
    if isinstance(pipe.microbatches, int):
        num_microbatches = pipe.microbatches
    else:  # a pipeline needs a micro-batch a stage, data parallelism one row a replica
        num_microbatches = pipe.initial_length if isinstance(pipe.initial_length, int) and most_dp == first_dp else 1
    if batch_size < most_dp * num_microbatches:
        raise UserError(
            f"train.batch_size: {batch_size} is smaller than dp x M = {most_dp} x {num_microbatches}; "
            f"give at least {most_dp * num_microbatches}"
            + (", or fewer pipe.microbatches" if isinstance(pipe.microbatches, int) else "")
        )


def read_plans(path: str, *, world: World, numbering: Numbering, total_steps: int) -> dict[int, ParallelPlan]:
    """The plans of an ``events.jsonl`` by the step they were adopted at, in the units of ``numbering``.

    Raises:
        UserError: if they are not of this job.
    """
    plans: dict[int, ParallelPlan] = {}
    try:
        events = read_events(Path(path))
    except UserError as error:
        raise UserError(f"run.replay: {error}") from error
    for event in events:
        if event.get("event") == "run" and event.get("total_steps", total_steps) != total_steps:
            raise UserError(
                f"run.replay: {path} was recorded with {event.get('total_steps')} steps and this job has "
                f"{total_steps}; give the same data, batch size and epochs"
            )
        if event.get("event") == "plan":
            try:
                plans[int(event["step"])] = ParallelPlan.from_dict(event["plan"])
            except (KeyError, TypeError, ValueError, AssertionError) as error:
                raise UserError(f"run.replay: {path} holds a plan that cannot be read ({error!r})") from error
        elif event.get("event") == "resume":  # what came after the checkpoint has not happened
            plans = {step: plan for step, plan in plans.items() if step <= int(event.get("step", 0))}
    if 0 not in plans:
        raise UserError(f"run.replay: {path} holds no plan for step 0; give the events.jsonl of a whole run")
    for step, plan in plans.items():
        if plan.world_size != world.size:
            raise UserError(
                f"run.replay: {path} was recorded with {plan.world_size} ranks and this job has {world.size}"
            )
        if world.local_size % plan.pp:
            raise UserError(
                f"run.replay: {path} holds a pipeline of {plan.pp} ranks, and a node, which holds whole pipelines, has "
                f"{world.local_size}; start it on as many nodes as it was recorded on"
            )
        if plan.num_blocks != numbering.num_blocks:
            raise UserError(
                f"run.replay: {path} was recorded with {plan.num_blocks} blocks and this model has "
                f"{numbering.num_blocks}"
            )
        renumbered = plan.renumbered(numbering.units_per_block)
        if renumbered is None:
            raise UserError(f"run.replay: {path} holds a plan that cuts blocks in halves; give pipe.units=half")
        plans[step] = renumbered
    return plans
