"""What two ranks run for ``pipetransformer partition``: measures the link between them by real sends."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from pipetransformer import failure
from pipetransformer.cli import run_guarded
from pipetransformer.errors import UserError
from pipetransformer.pipe.costs import Link

__all__ = ["measure_link"]


def measure_link() -> Link:
    """Between two ranks of this machine: GPUs, or processes over loopback where there is one. Raises UserError."""
    import torch

    from pipetransformer.adapter import run_ranks
    from pipetransformer.launch import free_port, prepare_ranks

    prepare_ranks(2)
    with tempfile.TemporaryDirectory(prefix="pipetransformer_") as folder:
        path = Path(folder) / "link.json"
        ends = run_ranks(
            Path(__file__),
            [str(path), "cuda" if torch.cuda.device_count() > 1 else "cpu"],
            num_ranks=2,
            num_nodes=1,
            node_rank=0,
            address="127.0.0.1",
            port=free_port(),
            stop_seconds=5,
        )
        if ends:
            raise UserError(f"the link between two ranks cannot be measured ({failure.first_cause(ends).line})")
        return Link(**json.loads(path.read_text()))


def _measure(path: Path, device: str) -> None:
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks for devices
    from pipetransformer.distributed import close_world, init_world
    from pipetransformer.links import send_seconds

    world = init_world(timeout_seconds=60)
    latency, per_byte = send_seconds(world)
    if world.rank == 0:
        path.write_text(json.dumps({"latency_ns": round(latency * 1e9), "ns_per_byte": per_byte * 1e9}))
    close_world()


if __name__ == "__main__":
    sys.exit(run_guarded(lambda: _measure(Path(sys.argv[1]), sys.argv[2])))
