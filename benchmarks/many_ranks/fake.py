"""One of 1,024 ranks that are not there: prints what it takes to plan transfers and to make groups, as JSON."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from time import perf_counter

import torch.distributed as dist

# Note: torch's own, for tests of what many ranks would do.
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.support.plans import even_plan
from pipetransformer.dp import transfers_of
from pipetransformer.dp.mesh import Mesh

NUM_RANKS, RANKS_PER_NODE, NUM_BLOCKS, RANK = 1024, 8, 96, 517
REPEATS = 5


plan_of = partial(even_plan, num_ranks=NUM_RANKS, num_blocks=NUM_BLOCKS)


def fastest(action: Callable[[], object]) -> float:
    seconds = []
    for _ in range(REPEATS):
        start = perf_counter()
        action()
        seconds.append(perf_counter() - start)
    return min(seconds)


def main() -> None:
    dist.init_process_group("fake", rank=RANK, world_size=NUM_RANKS, store=FakeStore())
    rows: list[dict[str, object]] = []
    for before, after in ((8, 4), (4, 1), (1, 8)):
        held, needed = (plan_of(pp, num_microbatches=pp).holders() for pp in (before, after))
        planning = fastest(partial(transfers_of, RANK, held, needed, ranks_per_node=RANKS_PER_NODE))
        tracemalloc.start()
        start = perf_counter()
        mesh = Mesh.build(pp=after, world_size=NUM_RANKS, timeout=timedelta(seconds=60))
        seconds, kept = perf_counter() - start, (mesh, plan_of(after, num_microbatches=after).holders())
        num_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        del kept
        mesh.close()
        name = f"{before}x{NUM_RANKS // before} -> {after}x{NUM_RANKS // after}, {NUM_RANKS} ranks, {NUM_BLOCKS} blocks"
        rows.append({"what": name, "planning s": planning, "groups s": seconds, "bytes of Python": num_bytes})
    dist.destroy_process_group()
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
