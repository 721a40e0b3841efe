"""Models as chains of units: built, wrapped, saved."""

from pipetransformer.models.build import BuiltModel, TimmModel, TransformersModel, build_model
from pipetransformer.models.chain import Chain, Stage

__all__ = ["BuiltModel", "Chain", "Stage", "TimmModel", "TransformersModel", "build_model"]
