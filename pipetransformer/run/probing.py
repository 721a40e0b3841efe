"""The linear probe before training: how much of the task a pre-trained model's blocks compute already."""

from __future__ import annotations

from time import perf_counter

from pipetransformer.engine.linear_probe import boundary_scores
from pipetransformer.freeze import AutoFreeze, free_blocks
from pipetransformer.process.world import World
from pipetransformer.run.events import Probed
from pipetransformer.run.job import Job


def probe(job: Job, autofreeze: AutoFreeze, *, world: World) -> Probed:
    """Collective. Fits linear heads at every boundary, while all weights are here, and tells AutoFreeze."""
    began, rows = perf_counter(), -(-job.config.train.batch_size // world.size)
    scores = boundary_scores(job.chain, job.datasets["train"], world=world, rows=rows)
    autofreeze.probed(scores)
    is_pretrained = job.config.model.pretrained
    free = free_blocks(scores, num_blocks=job.chain.num_blocks, is_pretrained=is_pretrained)
    return Probed(scores, free, perf_counter() - began)
