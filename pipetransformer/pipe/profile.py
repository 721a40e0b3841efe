"""Measures what every unit of a chain costs on this device, for one micro-batch shape."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from statistics import median

import torch
from torch import Tensor

from pipetransformer.adapter import belongs_to_parameter
from pipetransformer.distributed import now_ns
from pipetransformer.models import Chain
from pipetransformer.pipe.costs import UnitCosts
from pipetransformer.pipe.recompute import Recompute, kept_bytes, product_bytes

__all__ = ["profile_units"]

_LONG_NS = 350_000_000  # a profile that has taken so long is repeated no more: noise is a small part of it


def profile_units(
    chain: Chain,
    main: Tensor,
    inputs: Mapping[str, Tensor],
    *,
    length: int,
    repeats: int = 3,
    weights_apart: bool = False,
    recompute: str = "never",
) -> UnitCosts:
    """Times forward and backward of every unit; all units must be held and trainable. Slow ones are repeated less.

    Weights, RNG state and buffers are left as they were; gradients are cleared.

    Args:
        main: the model's main input [rows, ...]. inputs: what the stem and blocks read beside it.
        weights_apart: measure what of the backward weights take, by a backward of inputs alone; zeros otherwise.
        recompute: measure what recomputation adds, one of ``pipe.recompute.MODES``.
    """
    forward: list[list[int]] = [[] for _ in range(chain.num_units)]
    backward: list[list[int]] = [[] for _ in range(chain.num_units)]
    of_inputs: list[list[int]] = [[] for _ in range(chain.num_units)]
    again: list[list[int]] = [[] for _ in range(chain.num_units)]
    kept: list[int] = []
    rerun = Recompute(recompute)
    rerun.is_last_microbatch = False
    activation_bytes: list[int] = []
    boundary_bytes: list[int] = []
    devices = [chain.device] if chain.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        began = now_ns(chain.device)
        for repeat in range(repeats + 1):
            if repeat > 1 and now_ns(chain.device) - began > _LONG_NS:
                break
            hidden = main
            for unit in range(chain.num_units):
                only = range(unit, unit + 1)
                source = hidden.detach()
                if source.is_floating_point() and unit > 0:
                    source.requires_grad_()
                parameters = chain.named_parameters([unit]).values()
                for parameter in parameters:  # a step adds to gradients that are there
                    parameter.grad = torch.zeros_like(parameter)
                saved = _SavedBytes()
                start = now_ns(chain.device)
                if repeat == 0:  # the warm-up also counts bytes; hooks would disturb a timed run
                    with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
                        output = chain.run(only, source, inputs)
                else:
                    output = chain.run(only, source, inputs)
                middle = now_ns(chain.device)
                torch.autograd.backward(output, torch.ones_like(output))
                stop = now_ns(chain.device)
                if repeat == 0:
                    activation_bytes.append(saved.num_bytes)
                    boundary_bytes.append(output.numel() * output.element_size())
                    products = (
                        product_bytes(partial(chain.run, only, hidden, inputs)) if recompute == "selective" else 0
                    )
                    entered = hidden.numel() * hidden.element_size()
                    kept.append(kept_bytes(recompute, saved.num_bytes, entered, product_bytes=products))
                else:
                    forward[unit].append(middle - start)
                    backward[unit].append(stop - middle)
                    if recompute != "never":
                        rerun_output = rerun(partial(chain.run, only), source, inputs)
                        start = now_ns(chain.device)
                        torch.autograd.backward(rerun_output, torch.ones_like(output))
                        again[unit].append(now_ns(chain.device) - start - backward[unit][-1])
                    if weights_apart and source.requires_grad:
                        output = chain.run(only, source, inputs)
                        start = now_ns(chain.device)
                        torch.autograd.grad(output, source, torch.ones_like(output))
                        of_inputs[unit].append(now_ns(chain.device) - start)
                for parameter in parameters:
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
        weight_ns=tuple(
            max(0, int(median(whole)) - int(median(part or [0]))) if weights_apart else 0
            for whole, part in zip(backward, of_inputs)
        ),
        recompute_ns=tuple(max(0, int(median(times or [0]))) for times in again),
        kept_bytes=tuple(kept),
    )


def _time_prefix(chain: Chain, main: Tensor, inputs: Mapping[str, Tensor], *, repeats: int) -> tuple[int, ...]:
    """Forward of every unit as a frozen prefix runs it."""
    times: list[list[int]] = [[] for _ in range(chain.num_units)]
    chain.train(False)
    with torch.inference_mode():
        for _ in range(repeats + 1):
            hidden = main
            for unit in range(chain.num_units):
                start = now_ns(chain.device)
                hidden = chain.run(range(unit, unit + 1), hidden, inputs)
                times[unit].append(now_ns(chain.device) - start)
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
