"""The work of one rank under one plan: layout, feed, step, evaluation and weights, behind the class ``Engine``."""

from pipetransformer.engine.engine import Engine, Move
from pipetransformer.engine.evaluate import NotFinite
from pipetransformer.engine.executor import StepInput
from pipetransformer.engine.feed import Feed
from pipetransformer.engine.finite import are_finite
from pipetransformer.engine.objective import Loss, Objective
from pipetransformer.engine.step import NormSums, PhaseSeconds, Probe

__all__ = [
    "Engine",
    "Feed",
    "Move",
    "NormSums",
    "NotFinite",
    "Loss",
    "Objective",
    "PhaseSeconds",
    "Probe",
    "StepInput",
    "are_finite",
]
