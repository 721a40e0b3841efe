"""AutoFreeze: gradient norms in, the number of frozen leading blocks out."""

from pipetransformer.freeze.controller import AutoFreeze, FreezeDecision
from pipetransformer.freeze.guard import Guard, GuardSize, Verdict, guard_size
from pipetransformer.freeze.policy import Payoff, Policy, Signals, build_policy
from pipetransformer.freeze.probe import blocks_at_start, free_blocks, transfer

__all__ = [
    "AutoFreeze",
    "FreezeDecision",
    "Guard",
    "GuardSize",
    "Payoff",
    "Policy",
    "Signals",
    "Verdict",
    "blocks_at_start",
    "build_policy",
    "free_blocks",
    "guard_size",
    "transfer",
]
