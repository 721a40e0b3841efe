"""AutoFreeze: gradient norms in, the number of frozen leading blocks out."""

from pipetransformer.freeze.controller import AutoFreeze, FreezeDecision
from pipetransformer.freeze.guard import Guard, Verdict
from pipetransformer.freeze.policy import Policy, build_policy

__all__ = ["AutoFreeze", "FreezeDecision", "Guard", "Policy", "Verdict", "build_policy"]
