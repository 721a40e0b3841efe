"""Models that are no chain: traced, cut along a topological order, trained as stages of a pipeline."""

from pipetransformer.graph.graph import Edge, Graph, GraphTensor, GraphUnit
from pipetransformer.graph.pipeline import GraphPipeline
from pipetransformer.graph.profile import GraphCosts, profile_graph
from pipetransformer.graph.stage import GraphStage, StageSpec
from pipetransformer.graph.tied import sum_tied_gradients
from pipetransformer.graph.trace import trace

__all__ = [
    "Edge",
    "Graph",
    "GraphCosts",
    "GraphPipeline",
    "GraphStage",
    "GraphTensor",
    "GraphUnit",
    "StageSpec",
    "profile_graph",
    "sum_tied_gradients",
    "trace",
]
