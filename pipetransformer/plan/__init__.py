"""The immutable plan, passed from controller to controller, and its parts. No torch."""

from pipetransformer.plan.parallel_plan import PREFIXES, SHARDS, ParallelPlan

__all__ = ["PREFIXES", "SHARDS", "ParallelPlan"]
