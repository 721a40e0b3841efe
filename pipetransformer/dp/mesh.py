"""The (dp, pp) process groups over all ranks, made anew where pp changes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from pipetransformer.adapter import group_among


@dataclass(frozen=True, slots=True)
class Mesh:
    """The groups of one rank. pp is innermost, so that a pipeline stays on a node: rank = replica * pp + place.

    A group that spans the world is the job's own and outlives the mesh.

    Note: torch's ``DeviceMesh`` takes no time-out and never frees its groups; every transition would leak.

    Attributes:
        pp: ranks of a pipeline.
        pp_group: the ranks of this rank's pipeline; None for pp = 1.
        dp_group: the ranks at the same place of all pipelines; None for dp = 1.
    """

    pp: int
    pp_group: dist.ProcessGroup | None
    dp_group: dist.ProcessGroup | None

    @classmethod
    def build(cls, *, pp: int, world_size: int, timeout: timedelta) -> Mesh:
        """Collective. Makes the groups; ``pp`` must be the same on every rank and divide ``world_size``."""
        rank = dist.get_rank()
        pipeline, replicas = range(rank - rank % pp, rank - rank % pp + pp), range(rank % pp, world_size, pp)
        return cls(pp, pp_group=_group(pipeline, timeout), dp_group=_group(replicas, timeout))

    def close(self) -> None:
        """Frees the groups. Every rank must call it, and none may use the groups any longer."""
        for group in (self.pp_group, self.dp_group):
            if group is not None and group is not dist.group.WORLD:
                dist.destroy_process_group(group)


def _group(ranks: range, timeout: timedelta) -> dist.ProcessGroup | None:
    if len(ranks) == 1:
        return None
    return dist.group.WORLD if len(ranks) == dist.get_world_size() else group_among(ranks, timeout=timeout)
