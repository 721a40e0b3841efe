"""Models as chains of units: built, wrapped, saved."""

from pipetransformer.models.build import build_model
from pipetransformer.models.built import BuiltModel
from pipetransformer.models.chain import Chain
from pipetransformer.models.families import MASK
from pipetransformer.models.stage import Stage
from pipetransformer.models.timm_model import TimmModel
from pipetransformer.models.transformers_model import TransformersModel
from pipetransformer.models.values import Values
from pipetransformer.models.weight_files import saved_tensors

__all__ = [
    "MASK",
    "BuiltModel",
    "Chain",
    "Stage",
    "TimmModel",
    "TransformersModel",
    "Values",
    "build_model",
    "saved_tensors",
]
