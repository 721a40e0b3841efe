"""FTPipe's printout of a partition under its own labels, to the letter, and more below."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from statistics import mean, pvariance
from typing import Literal

from pipetransformer.graphs.analysis.ftpipe import PartTimes, imbalance, latencies, topology_imbalance
from pipetransformer.graphs.analysis.report import STATE_FACTOR, PartitionReport, slowdown

Labels = Literal["vision", "gpt2"]
"""FTPipe has two scripts. That for vision models prints theoretical times as sums alone, as "forward"; that for GPT-2
prints them as "sequential forward" and "parallel forward", and how much real times vary."""

_IMBALANCE = "imbalance is ratio of computation time between fastest and slowest parts between 0 and 1 higher is better"
_INPUT, _OUTPUT = " (input: the model's own, crosses no cut)", " (out: the model's own, crosses no cut)"

Volume = tuple[int, float]
"""Bytes, and their milliseconds over the link."""

_Theoretical = Sequence[tuple[str, PartTimes]]


def printout(report: PartitionReport, *, labels: Labels) -> str:
    return "\n".join([*_original(report, labels), "", *_more(report)])


def _original(report: PartitionReport, labels: Labels) -> Iterable[str]:
    include = "include" if report.recompute else "do not include"
    theoretical: _Theoretical = [("", report.sequential)]
    if labels == "gpt2":
        theoretical = [("sequential ", report.sequential), ("parallel ", report.parallel)]
    yield report.device
    yield report.title
    yield from ("cutting edges are edges between partitions", f"number of cutting edges: {len(report.edges)}", "")
    yield from (f"backward times {include} recomputation", "")
    yield "theoretical times are execution time based on sum of graph weights ms"
    for name, times in theoretical:
        yield from _both(times, name)
    yield from ("", "real times are based on real measurements of execution time of generated partitions ms")
    yield from _both(report.real)
    if labels == "gpt2":
        yield from _variation(report)
    yield from ("", _IMBALANCE)
    yield from _imbalances("imbalance", imbalance, theoretical, real=report.real)
    yield from ("", "topology aware imbalance is worst imbalance between 2 connected partitions")
    among_connected = partial(topology_imbalance, connected=report.connected)
    yield from _imbalances("topology aware imbalance", among_connected, theoretical, real=report.real, forward="forwad")
    yield from ("", "communication volumes size of activations of each partition")
    for part, (given, out) in enumerate(volumes(report)):
        is_last = part == len(report.traffic) - 1
        yield _exchange(part, *given, *out) + _INPUT * (part == 0) + _OUTPUT * is_last
    yield ""
    yield "ideal latency is the time that passes for a forward/backward pass to reach and leave the partition"
    for name, times in (("theoretical", report.sequential), ("real", report.real)):
        yield f"ideal {name} latencies ms"
        yield from _both(latencies(times, connected=report.connected))


def _variation(report: PartitionReport) -> Iterable[str]:
    for title, spread in (("variance of", pvariance), ("avg diviation from the mean of", mean_deviation)):
        times = of_rounds(report, spread)
        yield f"{title} real execution times ms"
        yield f"forward{_by_part(times.forward)}"
        yield f"backward{_by_part(times.backward)}"


def _imbalances(
    title: str,
    figure: Callable[[Sequence[float]], float],
    theoretical: _Theoretical,
    *,
    real: PartTimes,
    forward: str = "forward",
) -> Iterable[str]:
    for name, times in (*((f"theoretical {name}", times) for name, times in theoretical), ("\nreal ", real)):
        yield f"{name}{title}:"
        yield f"{forward} {figure(times.forward)}"
        yield f"backward {figure(times.backward)}"


def of_rounds(report: PartitionReport, figure: Callable[[Sequence[float]], float]) -> PartTimes:
    """A figure of the reported rounds, by part."""
    return PartTimes(
        tuple(figure(samples.values) for samples in report.forward),
        tuple(figure(samples.values) for samples in report.backward),
    )


def volumes(report: PartitionReport) -> list[tuple[Volume, Volume]]:
    """What each part is given and what it gives; of the first and the last the model's own, over the same link."""

    def own(num_bytes: int) -> Volume:
        return num_bytes, report.link.ns(num_bytes) / 1e6

    given = [own(report.input_bytes), *((t.received_bytes, t.receive_ms) for t in report.traffic[1:])]
    out = [*((t.sent_bytes, t.send_ms) for t in report.traffic[:-1]), own(report.output_bytes)]
    return list(zip(given, out, strict=True))


def _more(report: PartitionReport) -> Iterable[str]:
    both, link = report.real.both, report.link
    yield "backward traffic size of gradients of each partition"
    for part, traffic in enumerate(report.traffic):
        received = traffic.gradient_received_bytes, traffic.gradient_receive_ms
        yield _exchange(part, *received, traffic.gradient_sent_bytes, traffic.gradient_send_ms)
    yield f"link: {link.latency_ns / 1e3:.1f} us, {1 / max(link.ns_per_byte, 1e-9):.2f} GB/s, measured"
    yield f"micro-batch: {report.source}"
    yield ""
    for name, samples in (("forward", report.forward), ("backward", report.backward)):
        yield f"p50 and p95 of real {name} ms {_pairs((s.median, s.percentile(95)) for s in samples)}"
    yield f"real forward + backward {_by_part(both)}"
    yield f"theoretical over real {_by_part(t / r for t, r in zip(report.sequential.both, both))}"
    yield (
        f"real imbalance forward + backward {imbalance(both):.4f}; the best of any cut of these units was "
        f"{report.bound:.4f} by the rounds before, and is {report.bound_of_rounds:.4f} by these rounds"
    )
    yield f"mean over max {1 / slowdown(both):.4f}; slowdown against perfect balance {slowdown(both):.4f}"
    state = _by_part(STATE_FACTOR * n / 1e6 for n in report.weight_bytes)
    yield f"memory MB weights, gradients and AdamW's moments {state}"
    yield f"memory MB activations of a micro-batch {_by_part(n / 1e6 for n in report.activation_bytes)}"
    yield (
        f"1F1B with {report.num_microbatches} micro-batches: bubble {report.bubble:.4f}, "
        f"expected speed-up over one device {report.speed_up:.3f}"
    )
    yield "parts:"
    for part, (first, stop) in enumerate(pairwise((0, *report.boundaries, len(report.units)))):
        yield f"{part}: {stop - first} units, {report.units[first]} to {report.units[stop - 1]}"


def mean_deviation(values: Sequence[float]) -> float:
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
