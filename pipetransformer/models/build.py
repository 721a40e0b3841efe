"""Builds the model that the configuration names."""

from __future__ import annotations

import torch

from pipetransformer.config import Config
from pipetransformer.data import DataInfo
from pipetransformer.models.timm_model import TimmModel
from pipetransformer.models.transformers_model import TransformersModel


def build_model(config: Config, info: DataInfo) -> TimmModel | TransformersModel:
    """Builds the model of ``config.model`` for the labels and channels of ``info``, the same on every rank.

    Raises:
        UserError: the model cannot be found, or its arguments do not fit.
    """
    torch.manual_seed(config.train.seed)
    return TimmModel(config, info) if config.task == "image_classification" else TransformersModel(config, info)
