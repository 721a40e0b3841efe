"""The (dp, pp) process groups over all ranks, made anew where pp changes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist


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
        dp = world_size // pp
        pipelines = [[replica * pp + stage for stage in range(pp)] for replica in range(dp)]
        replicas = [list(ranks) for ranks in zip(*pipelines)]
        return cls(pp, pp_group=_groups(pipelines, timeout), dp_group=_groups(replicas, timeout))

    def close(self) -> None:
        """Frees the groups. Every rank must call it, and none may use the groups any longer."""
        for group in (self.pp_group, self.dp_group):
            if group is not None and group is not dist.group.WORLD:
                dist.destroy_process_group(group)


def _groups(members: list[list[int]], timeout: timedelta) -> dist.ProcessGroup | None:
    if len(members[0]) == 1:
        return None
    if len(members) == 1:
        return dist.group.WORLD
    group, _ = dist.new_subgroups_by_enumeration(members, timeout=timeout)
    assert not isinstance(group, int)  # torch gives a number to ranks outside of all groups; there are none
    return group
