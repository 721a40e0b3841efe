"""Process groups that their members make alone."""

from __future__ import annotations

from datetime import timedelta
from itertools import count

import torch
import torch.distributed as dist

# Note: private; the source of the name of a group that not all ranks make.
from torch.distributed import distributed_c10d

_numbers = count()
_WITHOUT_END = timedelta(days=365)


def group_among(ranks: range, *, timeout: timedelta) -> dist.ProcessGroup:
    """Collective of ``ranks``, but every rank of the job makes as many groups, in the same order.

    torch's ``new_group`` by its default, and all that is built on it, is called by every rank for every group of the
    job, which grows with the number of ranks.

    Note: older versions of torch name such a group by its ranks and by the number of groups that there are now: one
    that is made where an equal one has been freed would meet the addresses that the old one left in the store.
    """
    name = f"among-{next(_numbers)}-{ranks.start}-{ranks.stop}-{ranks.step}"
    torch_s = distributed_c10d._hash_ranks_to_str
    distributed_c10d._hash_ranks_to_str = lambda ranks: name
    try:
        group = dist.new_group([*ranks], timeout=timeout, use_local_synchronization=True)
    finally:
        distributed_c10d._hash_ranks_to_str = torch_s
    assert isinstance(group, dist.ProcessGroup)
    return group


def patient_group(*, timeout: timedelta) -> dist.ProcessGroup:
    """Collective, within ``timeout``. A group of all ranks, over gloo, in which they wait for each other without end:
    for a thread beside the main one, whose own collectives tell that a rank is gone.
    """
    group = dist.new_group(timeout=timeout, backend="gloo")
    assert isinstance(group, dist.ProcessGroup), "of all ranks"
    # Note: private; a time-out that is given to ``new_group`` is that of the ranks' meeting, too.
    group._get_backend(torch.device("cpu"))._set_default_timeout(_WITHOUT_END)
    return group
