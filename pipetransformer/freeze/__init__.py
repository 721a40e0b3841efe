"""AutoFreeze: gradient norms in, the number of frozen leading blocks out."""

from pipetransformer.freeze.controller import AutoFreeze, FreezeDecision
from pipetransformer.freeze.guard import Guard, Verdict
from pipetransformer.freeze.policy import Policy, Signals, build_policy

__all__ = ["AutoFreeze", "FreezeDecision", "Guard", "Policy", "Signals", "Verdict", "build_policy"]
