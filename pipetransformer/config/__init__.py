"""The configuration: all keys (``schema.py`` and the files that it names), read from YAML and overrides. No torch."""

from pipetransformer.config.data import DataConfig
from pipetransformer.config.freezing import FreezeConfig
from pipetransformer.config.lora import ALL_LINEAR
from pipetransformer.config.page import config_page
from pipetransformer.config.quantities import Interval
from pipetransformer.config.schema import (
    CacheConfig,
    Config,
    ModelConfig,
    load_config,
)
from pipetransformer.config.training import TrainConfig
from pipetransformer.config.types import Section

__all__ = [
    "ALL_LINEAR",
    "CacheConfig",
    "Config",
    "DataConfig",
    "FreezeConfig",
    "Interval",
    "ModelConfig",
    "Section",
    "TrainConfig",
    "config_page",
    "load_config",
]
