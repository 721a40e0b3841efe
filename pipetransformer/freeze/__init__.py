"""AutoFreeze: gradient norms in, the number of frozen leading blocks out."""

from pipetransformer.freeze.controller import AutoFreeze, FreezeDecision
from pipetransformer.freeze.guard import Guard, Verdict
from pipetransformer.freeze.policy import Payoff, Policy, Signals, build_policy
from pipetransformer.freeze.probe import free_blocks, transfer

__all__ = [
    "AutoFreeze",
    "FreezeDecision",
    "Guard",
    "Payoff",
    "Policy",
    "Signals",
    "Verdict",
    "build_policy",
    "free_blocks",
    "transfer",
]
