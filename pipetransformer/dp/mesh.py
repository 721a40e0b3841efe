"""The (dp, pp) process groups over all ranks; made and freed at every transition."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

__all__ = ["Mesh"]


@dataclass(frozen=True, slots=True)
class Mesh:
    """The groups of one rank; pp is innermost, so that a pipeline stays on a node: rank = replica * pp + stage.

    A ``DeviceMesh`` is not used: it takes no time-out and never frees its groups, so that every transition would leak.

    Attributes:
        pp_group, dp_group: None for an axis of length 1. A group that spans the world is the job's own and outlives
            the mesh.
    """

    pp_group: dist.ProcessGroup | None
    dp_group: dist.ProcessGroup | None

    @classmethod
    def build(cls, *, pp: int, world_size: int, timeout_seconds: float) -> Mesh:
        """Collective: every rank calls it with the same ``pp``."""
        dp = world_size // pp
        pipelines = [[replica * pp + stage for stage in range(pp)] for replica in range(dp)]
        replicas = [list(ranks) for ranks in zip(*pipelines)]
        return cls(
            pp_group=_groups(pipelines, timeout_seconds),
            dp_group=_groups(replicas, timeout_seconds),
        )

    def close(self) -> None:
        """Frees the groups. Collective in effect: no rank may still use them."""
        for group in (self.pp_group, self.dp_group):
            if group is not None and group is not dist.group.WORLD:
                dist.destroy_process_group(group)


def _groups(members: list[list[int]], timeout_seconds: float) -> dist.ProcessGroup | None:
    if len(members[0]) == 1:
        return None
    if len(members) == 1:
        return dist.group.WORLD
    timeout = timedelta(seconds=timeout_seconds)
    group, _ = dist.new_subgroups_by_enumeration(members, timeout=timeout)
    assert not isinstance(group, int)  # what a rank outside of all groups would get
    return group
