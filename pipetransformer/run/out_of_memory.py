"""A rank that has run out of memory: what would fit, and the limit under which the next start plans."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from pipetransformer.config import Config
from pipetransformer.errors import UserError
from pipetransformer.pipe.controller import AutoPipe
from pipetransformer.plan import ParallelPlan
from pipetransformer.process.files import write_whole
from pipetransformer.process.whereabouts import HERE

NAME = "memory_limit.json"
_ON_CPU = "DefaultCPUAllocator"


def in_training(error: BaseException) -> bool:
    """Whether an allocator, of a device or of the host, had no more to give while the job trained under a plan."""
    return HERE.phase not in (None, "set-up", "measuring") and _meant(error) is not None


def _meant(error: BaseException) -> BaseException | None:
    """The allocator's own error: schedules of ``torch.distributed.pipelining`` wrap it in theirs."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, (torch.OutOfMemoryError, MemoryError)) or _ON_CPU in str(found):
            return found
        found = found.__cause__
    return None


def told(error: BaseException, run_dir: Path, autopipe: AutoPipe, plan: ParallelPlan) -> UserError:
    """The error that names a plan which takes less, for which a limit is left in the run's folder; not collective.

    Args:
        run_dir: folder of the run.
        plan: the plan that took too much.
    """
    cause = " ".join(str(_meant(error) or error).split())[:120]
    taken, smaller = autopipe.smaller(plan, step=HERE.step)
    began = f"out of memory at {HERE} ({cause}): {_words(plan)} was to take {taken:,} bytes of a rank"
    if isinstance(smaller, UserError):
        return UserError(f"{began}, and no plan takes a tenth less ({smaller})")
    write_whole(run_dir / NAME, json.dumps({"bytes": smaller.limit, "since_step": HERE.step}))
    return UserError(f"{began}; run.resume=auto goes on with {_words(smaller.plan)}, for {smaller.limit:,} at most")


def limit_in(run_dir: Path) -> int | None:
    """The limit, in bytes, that an earlier start of the run has left; None for none."""
    try:
        return int(json.loads((run_dir / NAME).read_text(encoding="utf-8"))["bytes"])
    except (OSError, ValueError, KeyError, TypeError):  # none, or damaged
        return None


def under_limit(config: Config, limit: int | None) -> Config:
    """The configuration with ``limit``, if it is lower than its own."""
    own = config.pipe.memory_limit
    if limit is None or (own is not None and own <= limit):
        return config
    return config.with_overrides({"pipe.memory_limit": limit})


def _words(plan: ParallelPlan) -> str:
    return f"pp {plan.pp} x dp {plan.dp}, M {plan.num_microbatches}"
