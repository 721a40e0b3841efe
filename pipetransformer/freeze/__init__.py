"""AutoFreeze: gradient norms in, the number of frozen leading blocks out."""

from pipetransformer.freeze.controller import FreezeController, FreezeDecision
from pipetransformer.freeze.policies import Policy, build_policy

__all__ = ["FreezeController", "FreezeDecision", "Policy", "build_policy"]
