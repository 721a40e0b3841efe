"""The analysis of one partition: its figures, and those that follow from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import prod

from pipetransformer.graphs.analysis.ftpipe import PartTimes, imbalance, latencies, longest_path, topology_imbalance
from pipetransformer.graphs.analysis.parts import Samples
from pipetransformer.graphs.graph import Edge, Graph, GraphCosts
from pipetransformer.pipe.planner.costs import Link
from pipetransformer.pipe.planner.partition import balance_bound
from pipetransformer.pipe.planner.step_simulator import StageCosts, Timeline, simulate

STATE_FACTOR = 4
"""Bytes of weight, gradient and AdamW's two moments, for each byte of weight."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """The exchange of one part with others for a micro-batch: bytes as really sent, milliseconds over the link."""

    received_bytes: int
    sent_bytes: int
    gradient_received_bytes: int
    gradient_sent_bytes: int
    receive_ms: float
    send_ms: float
    gradient_receive_ms: float
    gradient_send_ms: float


@dataclass(frozen=True, slots=True)
class PartitionReport:
    """All figures of a partition; times in milliseconds, sizes in bytes.

    Attributes:
        boundaries: first unit of every part but the first.
        source: origin of the micro-batch.
        units: names of all units, in order.
        edges: tensors from one part to another.
        connected: (a, b) where part a sends to part b.
        sequential: theoretical times by part: sums of its units' own.
        parallel: theoretical times by part: the longest path of units whose work needs each other's.
        real: medians of the parts run as they are.
        forward, backward: rounds of the parts run as they are.
        bound: the best balance of any partition of the units, each with its share of the parts that ran before the
            reported rounds. Rounds differ: the reported balance may miss it, or pass it.
        bound_of_rounds: the same by the reported rounds themselves, so that their noise is in both.
        input_bytes, output_bytes: the model's own for a micro-batch; they cross no cut.
        weight_bytes: bytes of each part's weights.
        activation_bytes: bytes that each part keeps of one micro-batch until its backward; under 1F1B K - part times
            as many. With recomputation, those of the received tensors.
        num_microbatches: micro-batches of the simulated step.
        bubble: idle share of a simulated 1F1B step.
        speed_up: gain of a simulated 1F1B step over one device with all parts.
    """

    title: str
    device: str
    source: str
    num_parameters: int
    recompute: bool
    boundaries: tuple[int, ...]
    units: tuple[str, ...]
    edges: tuple[Edge, ...]
    connected: tuple[tuple[int, int], ...]
    sequential: PartTimes
    parallel: PartTimes
    real: PartTimes
    forward: tuple[Samples, ...]
    backward: tuple[Samples, ...]
    bound: float
    bound_of_rounds: float
    link: Link
    input_bytes: int
    output_bytes: int
    traffic: tuple[Traffic, ...]
    weight_bytes: tuple[int, ...]
    activation_bytes: tuple[int, ...]
    num_microbatches: int
    bubble: float
    speed_up: float

    def as_dict(self) -> dict[str, object]:
        """All attributes, and the quantities that follow from times."""
        theoretical = {"sequential": self.sequential, "parallel": self.parallel, "real": self.real}
        return {
            **asdict(self),
            "imbalance": {
                name: {"forward": imbalance(t.forward), "backward": imbalance(t.backward), "both": imbalance(t.both)}
                for name, t in theoretical.items()
            },
            "topology_aware_imbalance": {
                name: {
                    "forward": topology_imbalance(t.forward, connected=self.connected),
                    "backward": topology_imbalance(t.backward, connected=self.connected),
                }
                for name, t in theoretical.items()
            },
            "ideal_latency": {name: asdict(latencies(t, connected=self.connected)) for name, t in theoretical.items()},
            "slowdown": slowdown(self.real.both),
        }


def analyse(
    graph: Graph,
    boundaries: Sequence[int],
    *,
    costs: GraphCosts,
    before: GraphCosts,
    in_parts: GraphCosts,
    forward: Sequence[Samples],
    backward: Sequence[Samples],
    link: Link,
    recompute: bool,
    num_microbatches: int,
    title: str,
    device: str,
    source: str,
    num_parameters: int,
) -> PartitionReport:
    """The report of a partition.

    Args:
        costs: of the units one by one.
        before: the units' shares of the time that parts took before these rounds.
        in_parts: the units' shares of the time that their parts took in these rounds.
        forward, backward: times of each part, round by round.
    """
    stages, edges = graph.stages(boundaries), graph.edges(boundaries)
    sequential, parallel = _theoretical(graph, costs, stages)
    real = PartTimes(tuple(s.median for s in forward), tuple(s.median for s in backward))
    traffic = tuple(_traffic(costs, units, link=link) for units in stages)
    timeline = _step(real, traffic, link=link, num_microbatches=num_microbatches)
    return PartitionReport(
        title=title,
        device=device,
        source=source,
        num_parameters=num_parameters,
        recompute=recompute,
        boundaries=tuple(boundaries),
        units=tuple(unit.name for unit in graph.units),
        edges=edges,
        connected=tuple(sorted({(edge.producer, edge.consumer) for edge in edges})),
        sequential=sequential,
        parallel=parallel,
        real=real,
        forward=tuple(forward),
        backward=tuple(backward),
        bound=float(balance_bound(before.unit_ns, num_stages=len(stages))),
        bound_of_rounds=float(balance_bound(in_parts.unit_ns, num_stages=len(stages))),
        link=link,
        input_bytes=sum(prod(shape) * dtype.itemsize for shape, dtype in zip(graph.input_shapes, graph.input_dtypes)),
        output_bytes=sum(output.nbytes for output in graph.output_examples()),
        traffic=traffic,
        weight_bytes=tuple(sum(costs.parameter_bytes[u] for u in units) for units in stages),
        activation_bytes=tuple(
            traffic[part].received_bytes if recompute else costs.kept_bytes(units.start, units.stop)
            for part, units in enumerate(stages)
        ),
        num_microbatches=num_microbatches,
        bubble=timeline.bubble,
        speed_up=num_microbatches * sum(real.both) * 1e6 / timeline.compute,
    )


def _theoretical(graph: Graph, costs: GraphCosts, stages: Sequence[range]) -> tuple[PartTimes, PartTimes]:
    """(sequential, parallel) times of the parts, from those of their units."""
    sources = dict(enumerate(graph.work_needs()))
    columns = (costs.forward_ns, costs.returning_ns)
    sums = [tuple(sum(column[u] for u in units) / 1e6 for units in stages) for column in columns]
    paths = [tuple(longest_path(column, units, sources=sources) / 1e6 for units in stages) for column in columns]
    return PartTimes(*sums), PartTimes(*paths)


def _step(real: PartTimes, traffic: Sequence[Traffic], *, link: Link, num_microbatches: int) -> Timeline:
    """A simulated 1F1B step of the parts as they ran."""
    stages = [
        StageCosts(
            forward=round(forward * 1e6),
            backward=round(backward * 1e6),
            send=link.bytes_ns(part.sent_bytes),
            send_back=link.bytes_ns(part.gradient_sent_bytes),
        )
        for forward, backward, part in zip(real.forward, real.backward, traffic)
    ]
    return simulate("1f1b", stages, num_ranks=len(stages), num_microbatches=num_microbatches, latency=link.latency_ns)


def _traffic(costs: GraphCosts, units: range, *, link: Link) -> Traffic:
    received = costs.crossing_bytes[units.start - 1] if units.start else 0
    gradient_sent = costs.returned_bytes[units.start - 1] if units.start else 0
    sent, gradient_received = costs.crossing_bytes[units.stop - 1], costs.returned_bytes[units.stop - 1]

    def ms(num_bytes: int) -> float:
        return link.ns(num_bytes) / 1e6 if num_bytes else 0.0

    return Traffic(
        received_bytes=received,
        sent_bytes=sent,
        gradient_received_bytes=gradient_received,
        gradient_sent_bytes=gradient_sent,
        receive_ms=ms(received),
        send_ms=ms(sent),
        gradient_receive_ms=ms(gradient_received),
        gradient_send_ms=ms(gradient_sent),
    )


def slowdown(times: Sequence[float]) -> float:
    """Of a pipeline by its slowest part, against perfect balance."""
    return max(times) * len(times) / sum(times)
