"""Measures what every unit of a chain costs on this device, for one micro-batch shape."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from time import perf_counter_ns

import torch
from torch import Tensor

from pipetransformer.adapter import belongs_to_parameter
from pipetransformer.distributed import synchronize
from pipetransformer.models import Chain
from pipetransformer.pipe.costs import UnitCosts

__all__ = ["profile_units"]

_LONG_NS = 600_000_000  # a profile that has taken so long is repeated no more: noise is a small part of it


def profile_units(
    chain: Chain, main: Tensor, inputs: Mapping[str, Tensor], *, length: int, repeats: int = 3
) -> UnitCosts:
    """Times forward and backward of every unit; all units must be held and trainable. Slow ones are repeated less.

    Weights, RNG state and buffers are left as they were; gradients are cleared.

    Args:
        main: the model's main input [rows, ...]. inputs: what the stem and blocks read beside it.
    """
    forward: list[list[int]] = [[] for _ in range(chain.num_units)]
    backward: list[list[int]] = [[] for _ in range(chain.num_units)]
    activation_bytes: list[int] = []
    boundary_bytes: list[int] = []
    devices = [chain.device] if chain.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        began = _now(chain.device)
        for repeat in range(repeats + 1):
            if repeat > 1 and _now(chain.device) - began > _LONG_NS:
                break
            hidden = main
            for unit in range(chain.num_units):
                source = hidden.detach()
                if source.is_floating_point() and unit > 0:
                    source.requires_grad_()
                start = _now(chain.device)
                saved = _SavedBytes()
                if repeat == 0:  # the warm-up also counts bytes; hooks would disturb a timed run
                    with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
                        output = chain.run(range(unit, unit + 1), source, inputs)
                else:
                    output = chain.run(range(unit, unit + 1), source, inputs)
                middle = _now(chain.device)
                torch.autograd.backward(output, torch.ones_like(output))
                stop = _now(chain.device)
                if repeat == 0:
                    activation_bytes.append(saved.num_bytes)
                    boundary_bytes.append(output.numel() * output.element_size())
                else:
                    forward[unit].append(middle - start)
                    backward[unit].append(stop - middle)
                for parameter in chain.named_parameters([unit]).values():
                    parameter.grad = None  # at once: all units' gradients together may not fit
                hidden = output
        prefix = _time_prefix(chain, main, inputs, repeats=len(forward[0]))
    return UnitCosts(
        rows=main.shape[0],
        length=length,
        forward_ns=tuple(int(median(times)) for times in forward),
        backward_ns=tuple(int(median(times)) for times in backward),
        activation_bytes=tuple(activation_bytes),
        boundary_bytes=tuple(boundary_bytes),
        prefix_ns=prefix,
    )


def _time_prefix(chain: Chain, main: Tensor, inputs: Mapping[str, Tensor], *, repeats: int) -> tuple[int, ...]:
    """Forward of every unit as a frozen prefix runs it."""
    times: list[list[int]] = [[] for _ in range(chain.num_units)]
    chain.train(False)
    with torch.inference_mode():
        for _ in range(repeats + 1):
            hidden = main
            for unit in range(chain.num_units):
                start = _now(chain.device)
                hidden = chain.run(range(unit, unit + 1), hidden, inputs)
                times[unit].append(_now(chain.device) - start)
    chain.train()
    return tuple(int(median(unit_times[1:])) for unit_times in times)


class _SavedBytes:
    """Counts the bytes that autograd saves, each storage once, parameters left out."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._seen: set[int] = set()

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if not belongs_to_parameter(tensor) and storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.num_bytes += storage.nbytes()
        return tensor

    @staticmethod
    def unpack(tensor: Tensor) -> Tensor:
        return tensor


def _now(device: torch.device) -> int:
    synchronize(device)
    return perf_counter_ns()
