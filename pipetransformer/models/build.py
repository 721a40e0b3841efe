"""Builds the model that the configuration names."""

from __future__ import annotations

from pipetransformer.config import Config
from pipetransformer.data import DataInfo
from pipetransformer.models.timm_model import TimmModel
from pipetransformer.models.transformers_model import TransformersModel
from pipetransformer.models.values import Values, built_with_values


def build_model(config: Config, info: DataInfo) -> tuple[TimmModel | TransformersModel, Values]:
    """Builds the model of ``config.model`` for the labels and channels of ``info``, the same on every rank.

    Returns:
        The model, its weights on the meta device where they can be; and these weights.

    Raises:
        UserError: the model cannot be found, or its arguments do not fit.
    """
    kind = TimmModel if config.task == "image_classification" else TransformersModel
    return built_with_values(lambda: kind(config, info), seed=config.train.seed)
