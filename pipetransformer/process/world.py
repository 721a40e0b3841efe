"""The job's world: one rank a device, from the first step to the last.

Ranks come from torchrun (see ``launch/node.py``); an entry that runs alone is a world of one, without a port.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from pipetransformer.errors import UserError
from pipetransformer.process.heap import keep_freed_memory


@dataclass(frozen=True, slots=True)
class World:
    """This rank's place in the job.

    Attributes:
        rank: number in the job.
        size: ranks of the job.
        local_rank: number on its node.
        local_size: ranks of its node.
        device: device of this rank.
        timeout: longest time of a collective; give it to every group made later (torch's default is another).
        first_nodes: number of nodes that the run began on; None for those of now.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    timeout: timedelta = timedelta(minutes=5)
    first_nodes: int | None = None

    @property
    def num_nodes(self) -> int:
        return self.size // self.local_size

    @property
    def began_on(self) -> int:
        """The number of nodes that the run began on: each gives its own samples to every global batch, for good."""
        return self.num_nodes if self.first_nodes is None else self.first_nodes

    @property
    def sample_nodes(self) -> int:
        """The number of nodes that samples are tied to, each to one; 1 where every node may read any sample, because
        the run began on another number of nodes."""
        return self.num_nodes if self.began_on == self.num_nodes else 1


def init_world(*, timeout_seconds: float) -> World:
    """Join the default process group that torchrun's environment describes, or a group of one without it.

    Backend: NCCL for tensors on CUDA devices and gloo for those on the CPU; gloo alone where there is no CUDA device.
    """
    timeout = timedelta(seconds=timeout_seconds)
    launched = dist.is_torchelastic_launched()
    rank, size, local_rank, local_size = (
        int(os.environ[name]) if launched else alone
        for name, alone in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1))
    )
    device = _device(local_rank, local_size=local_size)
    on_cuda = device.type == "cuda"
    if not on_cuda:
        keep_freed_memory()
    if size == local_size:  # else gloo would listen where other machines can reach it
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_cuda else "gloo",
            store=None if launched else dist.HashStore(),  # type: ignore[attr-defined]
            rank=rank,
            world_size=size,
            timeout=timeout,
            device_id=device if on_cuda else None,
        )
    except dist.DistStoreError as error:
        raise UserError(f"run.timeout: not all ranks were there after {timeout_seconds:g} s; give more") from error
    sizes = [0] * size
    dist.all_gather_object(sizes, local_size)
    if len(set(sizes)) > 1:
        raise UserError(f"NPROC: the nodes have {', '.join(map(str, sorted(set(sizes))))} ranks; give all the same")
    return World(rank, size, local_rank, local_size, device, timeout)


def close_world() -> None:
    """Leave all groups, after a success: after a failure this may wait for peers (``process/shutdown.py``)."""
    dist.destroy_process_group()


def _device(local_rank: int, *, local_size: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if local_size > torch.cuda.device_count():
        raise UserError(
            f"NPROC: {local_size} ranks do not fit on {torch.cuda.device_count()} CUDA device(s), one a rank; "
            "give fewer, or set CUDA_VISIBLE_DEVICES= to run on the CPU"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device
