"""The model zoo: models for partition analysis and benchmarks, with published parameter counts."""

from pipetransformer.graphs.zoo.registry import ZOO, ZooModel, zoo_model

__all__ = ["ZOO", "ZooModel", "zoo_model"]
