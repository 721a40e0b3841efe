"""Models that are no chain: traced, cut along a topological order, trained as stages of a pipeline."""

from pipetransformer.graphs.graph.graph import Edge, Graph
from pipetransformer.graphs.graph.pipeline import GraphPipeline
from pipetransformer.graphs.graph.profile import GraphCosts, profile_graph
from pipetransformer.graphs.graph.stage import GraphStage
from pipetransformer.graphs.graph.trace import trace

__all__ = [
    "Edge",
    "Graph",
    "GraphCosts",
    "GraphPipeline",
    "GraphStage",
    "profile_graph",
    "trace",
]
