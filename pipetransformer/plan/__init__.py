"""The immutable plan that the controllers pass to each other, and what it is made of. No torch."""

from pipetransformer.plan.parallel_plan import ParallelPlan

__all__ = ["ParallelPlan"]
