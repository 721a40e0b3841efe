"""AutoFreeze: gradient norms in, the number of frozen leading blocks out."""

from pipetransformer.freeze.controller import AutoFreeze
from pipetransformer.freeze.decision import FreezeDecision
from pipetransformer.freeze.freezing import Freezing
from pipetransformer.freeze.guard import FEWEST_STEPS, Guard, GuardSize, Verdict, guard_size
from pipetransformer.freeze.policy import Payoff, Policy, Signals, build_policy
from pipetransformer.freeze.probe import NEARLY_ALL, NOISE, free_blocks, transfer

__all__ = [
    "FEWEST_STEPS",
    "NEARLY_ALL",
    "NOISE",
    "AutoFreeze",
    "FreezeDecision",
    "Freezing",
    "Guard",
    "GuardSize",
    "Payoff",
    "Policy",
    "Signals",
    "Verdict",
    "free_blocks",
    "build_policy",
    "guard_size",
    "transfer",
]
