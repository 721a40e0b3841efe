"""The configuration: every key in ``schema.py`` and ``freezing.py``, read from YAML and dotted overrides. No torch."""

from pipetransformer.config.freezing import FreezeConfig
from pipetransformer.config.page import config_page
from pipetransformer.config.quantities import Interval
from pipetransformer.config.schema import (
    CacheConfig,
    Config,
    DataConfig,
    TrainConfig,
    load_config,
)
from pipetransformer.config.types import Section

__all__ = [
    "CacheConfig",
    "Config",
    "DataConfig",
    "FreezeConfig",
    "Interval",
    "Section",
    "TrainConfig",
    "config_page",
    "load_config",
]
