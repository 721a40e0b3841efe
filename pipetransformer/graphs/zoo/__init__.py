"""The model zoo: what partition analysis and benchmarks cut and time, with published parameter counts."""

from pipetransformer.graphs.zoo.registry import ZOO, ZooModel, zoo_model

__all__ = ["ZOO", "ZooModel", "zoo_model"]
