"""Checks of what was only read so far where no GPU was at hand: each a yes or no with its evidence."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from time import perf_counter

import torch

from benchmarks.support.ranks import import_path
from pipetransformer.engine import Engine
from pipetransformer.plan import ParallelPlan

__all__ = ["Check", "same_bits", "a_raising_rank_ends_the_job", "boundaries_have_their_type", "memory_is_released"]

_MOST_SECONDS = 10.0
_RAISES = """
import sys, torch, torch.distributed as dist
from pipetransformer.launch.entry import run_guarded
def body():
    from pipetransformer.process.world import init_world
    world = init_world(timeout_seconds=300)
    dist.barrier()
    print("ready", flush=True)
    if world.rank == world.size - 1:
        raise RuntimeError("planted")
    dist.all_reduce(torch.zeros(1, device=world.device))
    dist.barrier()
sys.exit(run_guarded(body))
"""


@dataclass(frozen=True, slots=True)
class Check:
    """A question with its answer.

    Attributes:
        passed: None where the machine cannot tell.
    """

    name: str
    passed: bool | None
    evidence: str


def a_raising_rank_ends_the_job(num_ranks: int) -> Check:
    """By the launcher that users have: seconds from the exception to its end. A job that hangs is killed."""
    name = f"a raising rank ends its job in {_MOST_SECONDS:.0f} s"
    if num_ranks < 2:
        return Check(name, None, "one device")
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "raises.py"
        script.write_text(_RAISES)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
        started = perf_counter()
        process = subprocess.Popen(
            [*command, str(script)], env={**os.environ, **import_path()}, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        deadline = Timer(6 * _MOST_SECONDS, process.kill)
        deadline.start()
        ready = None
        for line in process.stdout:
            if line.startswith("ready") and ready is None:
                ready = perf_counter()
        code = process.wait()
        deadline.cancel()
        seconds = perf_counter() - (ready or started)
    return Check(name, ready is not None and code != 0 and seconds < _MOST_SECONDS, f"{seconds:.1f} s, status {code}")


def memory_is_released(engine: Engine, plan: ParallelPlan, later: ParallelPlan, step: Callable[[], None]) -> Check:
    """What a layout held is given back when the job leaves it."""
    name = "memory is released after a transition"
    if engine.chain.device.type != "cuda":
        return Check(name, None, "no GPU")
    engine.enter(plan)
    before = torch.cuda.memory_allocated()
    for _ in range(2):
        engine.enter(later)
        step()
        engine.enter(plan)
        engine.forget_steps()
    after = torch.cuda.memory_allocated()
    return Check(name, after <= 1.01 * before, f"{before / 2**20:.0f} MiB before, {after / 2**20:.0f} MiB after")


def boundaries_have_their_type(engine: Engine, inputs: dict[str, torch.Tensor]) -> Check:
    """What leaves a unit has the type that its receiver has memory for."""
    chain = engine.chain
    main, side = inputs[chain.family.main_input], {key: inputs[key] for key in chain.input_keys}
    wrong = []
    with torch.no_grad():
        hidden = main
        for unit in range(chain.num_units - 1):
            hidden = chain.run(range(unit, unit + 1), hidden, side)
            told = chain.boundary(unit, rows=hidden.shape[0], length=main.shape[1])
            if (told.shape, told.dtype) != (hidden.shape, hidden.dtype):
                wrong.append(
                    f"unit {unit}: {tuple(hidden.shape)} {hidden.dtype}, told {tuple(told.shape)} {told.dtype}"
                )
    return Check("boundaries have the type that is told", not wrong, "; ".join(wrong) or "all units")


def same_bits(run: Callable[[], tuple[list[torch.Tensor], list[torch.Tensor]]]) -> Check:
    """Twice the same steps from the same weights: ``run`` gives them before and after."""
    (before, first), (_, second) = run(), run()
    differ = sum(not torch.equal(a, b) for a, b in zip(first, second))
    stayed = sum(torch.equal(a, b) for a, b in zip(before, first))
    evidence = f"{differ} of {len(first)} tensors differ, {stayed} have not moved"
    return Check("the same steps give the same bits", differ == 0 and stayed < len(first), evidence)
