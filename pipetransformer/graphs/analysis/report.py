"""The analysis of one partition: FTPipe's printout with its own labels, additions, and the same as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from statistics import mean, pvariance

from pipetransformer.graphs.analysis.ftpipe import PartTimes, imbalance, latencies, longest_path, topology_imbalance
from pipetransformer.graphs.analysis.parts import Samples
from pipetransformer.graphs.graph import Edge, Graph, GraphCosts
from pipetransformer.pipe.planner.costs import Link
from pipetransformer.pipe.planner.partition import balance_bound
from pipetransformer.pipe.planner.step_simulator import StageCosts, Timeline, simulate

STATE_FACTOR = 4
"""Bytes of weight, gradient and AdamW's two moments, for each byte of weight."""

_IMBALANCE = "imbalance is ratio of computation time between fastest and slowest parts between 0 and 1 higher is better"


@dataclass(frozen=True, slots=True)
class Traffic:
    """The exchange of one part for a micro-batch: bytes as really sent, milliseconds over the measured link."""

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
        units: names of all units, in order.
        edges: tensors from one part to another.
        connected: (a, b) where part a sends to part b.
        sequential: theoretical times by part: sums of its units' own.
        parallel: theoretical times by part: the longest path of units that need each other.
        real: medians of the parts run as they are.
        forward, backward: rounds of the parts run as they are.
        bound: the best balance of any partition of these units, each with its share of its part's time.
        weight_bytes: bytes of each part's weights.
        activation_bytes: bytes that each part keeps of one micro-batch until its backward; under 1F1B K - part times
            as many. With recomputation, those of the received tensors.
        num_microbatches: micro-batches of the simulated step.
        bubble: idle share of a simulated 1F1B step.
        speed_up: gain of a simulated 1F1B step over one device with all parts.
    """

    title: str
    device: str
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
    link: Link
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
            "slowdown": _slowdown(self.real.both),
        }

    def text(self) -> str:
        """FTPipe's printout, under its own labels to the letter, and more below."""
        return "\n".join([*self._original(), "", *self._more()])

    def _original(self) -> Iterable[str]:
        include = "include" if self.recompute else "do not include"
        yield self.device
        yield self.title
        yield from ("cutting edges are edges between partitions", f"number of cutting edges: {len(self.edges)}", "")
        yield from (f"backward times {include} recomputation", "")
        yield "theoretical times are execution time based on sum of graph weights ms"
        yield from _both(self.sequential, "sequential ")
        yield from _both(self.parallel, "parallel ")
        yield from ("", "real times are based on real measurements of execution time of generated partitions ms")
        yield from _both(self.real)
        for title, spread in (("variance of", pvariance), ("avg diviation from the mean of", _mean_deviation)):
            yield f"{title} real execution times ms"
            yield f"forward{_by_part(spread(s.values) for s in self.forward)}"
            yield f"backward{_by_part(spread(s.values) for s in self.backward)}"
        yield from ("", _IMBALANCE)
        yield from self._imbalances("imbalance", imbalance)
        yield from ("", "topology aware imbalance is worst imbalance between 2 connected partitions")
        among_connected = partial(topology_imbalance, connected=self.connected)
        yield from self._imbalances("topology aware imbalance", among_connected, forward="forwad")
        yield from ("", "communication volumes size of activations of each partition")
        for part, traffic in enumerate(self.traffic):
            received = traffic.received_bytes, traffic.receive_ms
            yield _exchange(part, *received, traffic.sent_bytes, traffic.send_ms)
        yield ""
        yield "ideal latency is the time that passes for a forward/backward pass to reach and leave the partition"
        for name, times in (("theoretical", self.sequential), ("real", self.real)):
            yield f"ideal {name} latencies ms"
            yield from _both(latencies(times, connected=self.connected))

    def _imbalances(
        self, title: str, figure: Callable[[Sequence[float]], float], *, forward: str = "forward"
    ) -> Iterable[str]:
        for name, times in (
            ("theoretical sequential", self.sequential),
            ("theoretical parallel", self.parallel),
            ("\nreal", self.real),
        ):
            yield f"{name} {title}:"
            yield f"{forward} {figure(times.forward)}"
            yield f"backward {figure(times.backward)}"

    def _more(self) -> Iterable[str]:
        both, link = self.real.both, self.link
        yield "backward traffic size of gradients of each partition"
        for part, traffic in enumerate(self.traffic):
            received = traffic.gradient_received_bytes, traffic.gradient_receive_ms
            yield _exchange(part, *received, traffic.gradient_sent_bytes, traffic.gradient_send_ms)
        yield f"link: {link.latency_ns / 1e3:.1f} us, {1 / max(link.ns_per_byte, 1e-9):.2f} GB/s, measured"
        yield ""
        for name, samples in (("forward", self.forward), ("backward", self.backward)):
            yield f"p50 and p95 of real {name} ms {_pairs((s.median, s.percentile(95)) for s in samples)}"
        yield f"real forward + backward {_by_part(both)}"
        yield f"theoretical over real {_by_part(t / r for t, r in zip(self.sequential.both, both))}"
        yield f"real imbalance forward + backward {imbalance(both):.4f}; no cut of these units exceeds {self.bound:.4f}"
        yield f"mean over max {1 / _slowdown(both):.4f}; slowdown against perfect balance {_slowdown(both):.4f}"
        state = _by_part(STATE_FACTOR * n / 1e6 for n in self.weight_bytes)
        yield f"memory MB weights, gradients and AdamW's moments {state}"
        yield f"memory MB activations of a micro-batch {_by_part(n / 1e6 for n in self.activation_bytes)}"
        yield (
            f"1F1B with {self.num_microbatches} micro-batches: bubble {self.bubble:.4f}, "
            f"expected speed-up over one device {self.speed_up:.3f}"
        )
        yield "parts:"
        for part, (first, stop) in enumerate(pairwise((0, *self.boundaries, len(self.units)))):
            yield f"{part}: {stop - first} units, {self.units[first]} to {self.units[stop - 1]}"


def analyse(
    graph: Graph,
    boundaries: Sequence[int],
    *,
    costs: GraphCosts,
    in_parts: GraphCosts,
    forward: Sequence[Samples],
    backward: Sequence[Samples],
    link: Link,
    recompute: bool,
    num_microbatches: int,
    title: str,
    device: str,
    num_parameters: int,
) -> PartitionReport:
    """The report of a partition.

    Args:
        costs: of the units one by one.
        in_parts: the units' shares of the time that their parts took.
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
        bound=float(balance_bound(in_parts.unit_ns, num_stages=len(stages))),
        link=link,
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
    sources: Mapping[int, set[int]] = {unit: set() for unit in range(graph.num_units)}
    for tensor in graph.tensors:
        for consumer in tensor.consumers:
            sources[consumer].add(tensor.producer)
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


def _slowdown(times: Sequence[float]) -> float:
    return max(times) * len(times) / sum(times)


def _mean_deviation(values: Sequence[float]) -> float:
    """Mean distance from the mean."""
    middle = mean(values)
    return mean(abs(value - middle) for value in values)


def _both(times: PartTimes, prefix: str = "") -> Iterable[str]:
    yield f"{prefix}forward {_by_part(times.forward)}"
    yield f"{prefix}backward {_by_part(times.backward)}"


def _exchange(part: int, received_bytes: int, receive_ms: float, sent_bytes: int, send_ms: float) -> str:
    return (
        f"{part}: input size: {received_bytes / 1e6} MB recieve_time: {receive_ms} ms "
        f"out: {sent_bytes / 1e6} MB send time: {send_ms} ms"
    )


def _by_part(values: Iterable[float]) -> str:
    return str(dict(enumerate(values)))


def _pairs(values: Iterable[tuple[float, float]]) -> str:
    return "{" + ", ".join(f"{part}: {a:.3f} {b:.3f}" for part, (a, b) in enumerate(values)) + "}"
