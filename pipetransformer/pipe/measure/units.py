"""Measures the costs of every unit of a chain on this device, for some shapes of micro-batches."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from statistics import median
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from pipetransformer.adapter import (
    LiveBytes,
    Recompute,
    belongs_to_parameter,
    bytes_between_halves,
    kept_bytes,
    product_bytes,
    storage_of,
)
from pipetransformer.models import Chain
from pipetransformer.pipe.planner.costs import UnitCosts
from pipetransformer.process.device import now_ns

Result = TypeVar("Result")

_FEWEST_SHAPES = 2
_ROUNDS, _FEWEST, _LONG_SECONDS = 3, 2, 0.35  # a third round only if a shape took less than this in the first two
_TIMED = ("forward", "backward", "forward again", "backward of inputs", "backward with recomputation", "prefix")
_CACHE_BYTES = 2**26  # more than one core's share of the processor's caches


@dataclass(frozen=True, slots=True)
class Speeds:
    """Speeds of a device, assumed where nothing is timed.

    Attributes:
        ns_per_operation: nanoseconds of an operation on two numbers.
        ns_per_byte: nanoseconds of a byte of its memory.
    """

    ns_per_operation: float = 0.01
    ns_per_byte: float = 0.1


@dataclass(frozen=True, slots=True)
class Microbatch:
    """The inputs of a timed forward.

    Attributes:
        main: main input of the model [rows, ...].
        inputs: other inputs of stem and blocks by name, such as attention masks, each [rows, ...].
        length: padded length of the samples.
    """

    main: Tensor
    inputs: Mapping[str, Tensor]
    length: int


def profile_units(
    chain: Chain,
    microbatches: Sequence[Microbatch],
    *,
    units: range,
    weights_apart: bool = False,
    recompute: str = "never",
    budget_seconds: float = math.inf,
    agree: Callable[[float], float] = float,
) -> list[UnitCosts]:
    """Times forward and backward of some units, and counts their bytes.

    Units that this rank does not hold are lent to it; others must be trainable. Each round times every shape once, so
    that a slow moment of the machine spoils one sample of each shape, not all samples of one. A first round is not
    counted: where memory is touched for the first time, the backward of an embedding took 25 times as long as later.
    Weights, state of random numbers and buffers are left as they were; gradients are deleted. Weights that would rest
    are awake: what it takes to widen them counts nowhere.

    Args:
        microbatches: one example of each shape.
        units: consecutive units.
        weights_apart: whether the gradients of weights are timed separately, by a backward of inputs alone; their costs
            are zero otherwise.
        recompute: mode of recomputation whose costs are measured, one of ``adapter.MODES``.
        budget_seconds: seconds that all may take; one round of the first two shapes is always timed.
        agree: gives the seconds that all ranks go by, from this rank's.

    Returns:
        The costs by unit, 0 for those that are not of ``units``, for each of ``microbatches``; for the first ones alone
        where the budget is too small.
    """

    def seconds(since: int) -> float:
        return agree((now_ns(chain.device) - since) / 1e9)

    shapes = [_Shape(chain, batch, units, weights_apart=weights_apart, recompute=recompute) for batch in microbatches]
    with chain.lent(units, awake=True), _same_random(chain):
        began = now_ns(chain.device)
        shapes[0].count_bytes()
        # Counting takes about as long as the fewest rounds.
        of_each = accumulate(2 * seconds(began) * shape.size / shapes[0].size for shape in shapes)
        fitting = sum(total <= budget_seconds for total in of_each)
        shapes = shapes[: max(fitting, _FEWEST_SHAPES)]
        for shape in shapes[1:]:
            shape.count_bytes()
        for shape in shapes:
            shape.time()
            shape.forget_times()
        first_round = now_ns(chain.device)
        for number in range(_ROUNDS):
            spent = seconds(first_round)
            if number >= _FEWEST and spent > _LONG_SECONDS * len(shapes):
                break
            if number and seconds(began) + spent / number > budget_seconds:
                break
            for shape in shapes:
                shape.time()
    return [shape.costs() for shape in shapes]


def count_units(
    chain: Chain,
    microbatches: Sequence[Microbatch],
    *,
    units: range,
    weights_apart: bool = False,
    recompute: str = "never",
    speeds: Speeds | None = None,
) -> list[UnitCosts]:
    """Counts the bytes of units, and operations in place of times. Arguments as of ``profile_units``.

    Under ``adapter.shapes_alone`` too. Of blocks that are alike (``Chain.alike``) the first one is counted.

    Args:
        speeds: assumed, of the device; None for 100 billion operations and 10 GB a second.
    """
    alike, counted, seen = chain.alike(), list[UnitCosts](), dict[int, int]()
    first = {unit: seen.setdefault(alike[unit], unit) for unit in units}
    with chain.with_stand_ins(), chain.lent(units, awake=True), _same_random(chain):
        for batch in microbatches:
            shape = _Shape(chain, batch, units, weights_apart=weights_apart, recompute=recompute, first=first)
            shape.count_bytes()
            shape.count_operations(speeds or Speeds())
            costs = shape.costs()
            columns = (tuple(c[first.get(unit, unit)] for unit in range(chain.num_units)) for c in costs.columns())
            counted.append(UnitCosts(costs.rows, costs.length, *columns))
    return counted


def prefix_seconds(chain: Chain, batch: Microbatch, units: range) -> float:
    """Seconds of a forward of ``units`` as a frozen prefix, timed as ``profile_units`` does."""
    shape = _Shape(chain, batch, units, weights_apart=False, recompute="never")
    with chain.lent(units, awake=True):
        for _ in range(_ROUNDS + 1):
            shape.time_prefix()
    return sum(shape.costs_of_prefix()) / 1e9


def _same_random(chain: Chain) -> AbstractContextManager[None]:
    return torch.random.fork_rng(devices=[chain.device] if chain.device.type == "cuda" else [])


def _medians(rounds: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Median nanoseconds of each unit [num_units]; 0 for units without times.

    All are scaled so that their sum is the median of a whole round. Short disturbances of the machine miss most
    samples of a short unit, but every step contains some of them. The scale adds them again.

    Args:
        rounds: nanoseconds of each unit in every round.
    """
    timed = [times for times in rounds if times]
    by_unit = [median(times) if times else 0 for times in rounds]
    level = median(map(sum, zip(*timed))) / sum(by_unit) if sum(by_unit) else 1.0
    return tuple(round(level * middle) for middle in by_unit)


def _above(times: Sequence[int], others: Sequence[int]) -> tuple[int, ...]:
    """The excess of each of ``times`` over the other one; 0 where it is shorter."""
    return tuple(max(0, time - other) for time, other in zip(times, others))


class _Shape:
    """One shape of micro-batches, with the measurements of some units.

    Args:
        first: the unit that is measured for each, where not all that are alike need be.
    """

    def __init__(
        self,
        chain: Chain,
        batch: Microbatch,
        units: range,
        *,
        weights_apart: bool,
        recompute: str,
        first: Mapping[int, int] | None = None,
    ) -> None:
        self._chain = chain
        self._units: Sequence[int] = units if first is None else [unit for unit in units if first[unit] == unit]
        main = batch.main.to(chain.dtype) if batch.main.is_floating_point() else batch.main  # as in a step
        self._entering, self._rows = main, len(main)
        if units.start > 0:  # Note: zeros would stay zeros in a model from scratch, whose layer norms then overflow
            like = chain.boundary(units.start - 1, rows=len(main), length=batch.length)
            random = torch.Generator(chain.device).manual_seed(0)
            self._entering = torch.randn(like.shape, generator=random, dtype=like.dtype, device=chain.device)
        self._inputs = batch.inputs
        self._length = batch.length
        self.size = len(main) * batch.length
        self._weights_apart = weights_apart
        self._mode = recompute
        self._recompute = Recompute(recompute)
        self._recompute.is_last_microbatch = False
        self._bytes: dict[str, list[int]] = defaultdict(lambda: [0] * chain.num_units)
        self.forget_times()

    def forget_times(self) -> None:
        """Deletes all rounds so far."""
        self._times = {name: [list[int]() for _ in range(self._chain.num_units)] for name in _TIMED}

    def count_bytes(self) -> None:
        """Counts the bytes of every unit. It is a round of its own, because the counting would disturb the times.

        It also warms up the machine for the timed rounds.
        """
        hidden = self._entering
        for unit in self._units:
            source, parameters = self._enter(unit, hidden), self._with_gradients(unit)
            saved, live = dict[int, int](), LiveBytes()
            with live, torch.autograd.graph.saved_tensors_hooks(partial(_note, saved), lambda tensor: tensor):
                output = self._run(unit, source)
            activation_bytes = sum(saved.values())
            live.peak = before = live.alive
            with live:
                _backward(output, torch.ones_like(output))
            products = product_bytes(partial(self._run, unit, hidden)) if self._mode == "selective" else 0
            between, source = 0, self._enter(unit, hidden)
            if self._weights_apart and source.requires_grad:
                between = bytes_between_halves(partial(self._run, unit), source, parameters)
            kept = kept_bytes(self._mode, activation_bytes, hidden.nbytes, product_bytes=products)
            counted = dict(
                activation_bytes=activation_bytes, boundary_bytes=output.nbytes, kept_bytes=kept,
                entering_bytes=hidden.nbytes, working_bytes=live.peak - before,
                between_bytes=between,
            )  # fmt: skip
            for name, num_bytes in counted.items():
                self._bytes[name][unit] = num_bytes
            _clear(parameters)
            hidden = output.detach()
        self._run_prefix(counts_bytes=True)

    def time(self) -> None:
        """Times one round of all units, in training and as a frozen prefix."""
        self._run_units(self._time_backward, "forward")
        if self._weights_apart:
            self._run_units(self._time_of_inputs, "forward again")
        self.time_prefix()

    def count_operations(self, speeds: Speeds) -> None:
        """Notes nanoseconds at assumed speeds: those of a forward, and twice as many of a backward."""
        hidden = self._entering
        with torch.no_grad():
            for unit in self._units:
                with FlopCounterMode(display=False) as counter:
                    output = self._run(unit, hidden)
                moved = hidden.nbytes + output.nbytes
                ns = round(speeds.ns_per_operation * counter.get_total_flops() + speeds.ns_per_byte * moved)
                shares = {"backward": 2, "backward with recomputation": 2 + (self._mode != "selective")}
                for name in _TIMED:
                    self._times[name][unit].append(shares.get(name, 1) * ns)
                hidden = output

    def _run_units(self, time_backward: Callable[[int, Tensor, Tensor], None], forward: str) -> None:
        """Runs forward and backward of every unit.

        In a step, the rest of a stage runs between the forward and the backward of a unit, so that the processor's
        cache no longer holds its activations. Backwards wait here until the same is true. With recomputation, the
        activations are fresh, and no backward waits.
        """
        hidden, waiting_bytes = self._entering, 0
        most = _CACHE_BYTES if self._mode == "never" else 0
        waiting: deque[tuple[int, Tensor, Tensor]] = deque()
        for unit in self._units:
            source = self._enter(unit, hidden)
            output = self._timed(forward, unit, partial(self._run, unit, source))
            waiting.append((unit, source, output))
            hidden = output.detach()
            waiting_bytes += self._bytes["activation_bytes"][unit]
            while waiting and waiting_bytes > most:
                waiting_bytes -= self._bytes["activation_bytes"][waiting[0][0]]
                time_backward(*waiting.popleft())
        while waiting:
            time_backward(*waiting.popleft())

    def _time_backward(self, unit: int, source: Tensor, output: Tensor) -> None:
        parameters, gradient = self._with_gradients(unit), torch.ones_like(output)
        self._timed("backward", unit, partial(_backward, output, gradient))
        if self._mode != "never":
            source.grad = None
            again = self._recompute(partial(self._run, unit), source)
            self._timed("backward with recomputation", unit, partial(_backward, again, gradient))
        _clear(parameters)

    def _time_of_inputs(self, unit: int, source: Tensor, output: Tensor) -> None:
        if source.requires_grad:
            action = partial(torch.autograd.grad, output, source, torch.ones_like(output))
            self._timed("backward of inputs", unit, action)

    def time_prefix(self) -> None:
        """Times one round of all units as a frozen prefix."""
        self._run_prefix(counts_bytes=False)

    def costs_of_prefix(self) -> tuple[int, ...]:
        """Nanoseconds of each unit as a frozen prefix by all rounds so far [num_units]."""
        return _medians(self._times["prefix"])

    def costs(self) -> UnitCosts:
        """The costs by all rounds so far."""
        ns = {name: _medians(rounds) for name, rounds in self._times.items()}
        backward = ns["backward"]
        of_inputs = ns["backward of inputs"] if self._weights_apart else backward
        return UnitCosts(
            rows=self._rows,
            length=self._length,
            forward_ns=ns["forward"],
            backward_ns=backward,
            prefix_ns=ns["prefix"],
            weight_ns=_above(backward, of_inputs),
            recompute_ns=_above(ns["backward with recomputation"], backward),
            **{name: tuple(column) for name, column in self._bytes.items()},
        )

    def _timed(self, name: str, unit: int, action: Callable[[], Result]) -> Result:
        device = self._chain.device
        start = now_ns(device)
        result = action()
        self._times[name][unit].append(now_ns(device) - start)
        return result

    def _run(self, unit: int, source: Tensor) -> Tensor:
        return self._chain.run(range(unit, unit + 1), source, self._inputs)

    @staticmethod
    def _enter(unit: int, hidden: Tensor) -> Tensor:
        """The input of ``unit``, as a stage receives it: outside the graph, with a gradient behind the stem."""
        source = hidden.detach()
        return source.requires_grad_() if source.is_floating_point() and unit > 0 else source

    def _with_gradients(self, unit: int) -> Sequence[torch.nn.Parameter]:
        """What trains of ``unit``, with gradients of zero for the backward to add to, as in a step."""
        parameters = list(self._chain.trained_parameters([unit]).values())
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        return parameters

    def _run_prefix(self, *, counts_bytes: bool) -> None:
        """Runs the forward of every unit as in a frozen prefix: eval mode, no graph.

        Args:
            counts_bytes: whether to count the most bytes that a unit holds beside its input, instead of its time.
        """
        hidden = self._entering
        self._chain.train(False)
        with torch.inference_mode():
            for unit in self._units:
                if counts_bytes:
                    with LiveBytes() as live:
                        hidden = self._run(unit, hidden)
                    self._bytes["prefix_bytes"][unit] = live.peak
                else:
                    hidden = self._timed("prefix", unit, partial(self._run, unit, hidden))
        self._chain.train()


def _backward(output: Tensor, gradient: Tensor) -> None:
    """None of a stem that does not train."""
    if output.requires_grad:
        torch.autograd.backward(output, gradient)


def _clear(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Deletes gradients. It is called after each unit: the gradients of all units together may not fit."""
    for parameter in parameters:
        parameter.grad = None


def _note(saved: dict[int, int], tensor: Tensor) -> Tensor:
    """Notes the bytes of a tensor that autograd saves for a backward: each storage once, without parameters."""
    if not belongs_to_parameter(tensor):
        storage, num_bytes = storage_of(tensor)
        saved.setdefault(storage, num_bytes)
    return tensor
