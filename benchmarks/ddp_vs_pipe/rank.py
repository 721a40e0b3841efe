"""FOLDER MODULE:FUNCTION SECONDS: one rank of one measurement, under torchrun (``fresh_ranks``)."""

from __future__ import annotations

import os
import sys
import traceback
from importlib import import_module
from pathlib import Path
from threading import Timer, main_thread
from time import time

import torch

from benchmarks.ddp_vs_pipe.fresh_ranks import types_of
from pipetransformer.launch.entry import run_guarded
from pipetransformer.process import failure, shutdown
from pipetransformer.process.world import close_world, init_world


def main(folder: Path, function_name: str, timeout_seconds: float) -> None:
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    late = Timer(timeout_seconds, _give_up, (rank, timeout_seconds))
    late.daemon = True
    late.start()
    module, _, name = function_name.partition(":")
    function = getattr(import_module(module), name)
    given, returned = types_of(function)
    try:
        world = init_world(timeout_seconds=timeout_seconds)
        result = function(world, given.validate_json((folder / "argument.json").read_bytes()))
        (folder / f"{rank}.json").write_bytes(returned.dump_json(result))
        close_world()
    except Exception as error:
        if _is_out_of_memory(error):
            (folder / f"{rank}.out_of_memory").touch()
        raise


def _give_up(rank: int, timeout_seconds: float) -> None:
    """In a thread of its own, wherever the main thread stands."""
    stands = "".join(traceback.format_stack(sys._current_frames()[main_thread().ident or 0]))
    line = f"no answer within {timeout_seconds:.0f} s"
    report = failure.Failure(line=line, details=stands, followed=False, time=time())
    failure.write_report(Path(os.environ["TORCHELASTIC_ERROR_FILE"]), rank=rank, report=report)
    shutdown.leave(1)


def _is_out_of_memory(error: Exception) -> bool:
    """Note: only messages tell of the CPU's allocator and of NCCL's buffers."""
    text = str(error)
    is_typed = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    return is_typed or "out of memory" in text or "can't allocate memory" in text


if __name__ == "__main__":
    sys.exit(run_guarded(lambda: main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]))))
