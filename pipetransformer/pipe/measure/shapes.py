"""Costs of a job from the shapes of its model alone: no weight is read or drawn, nothing is timed.

Assumed: every sample has the longest text, or the picture, that the configuration allows; devices, links and memory
have the speeds that are given; a forward takes its matrix products and the bytes that enter and leave each unit, a
backward twice that; weights, gradients and moments are float32, activations of bfloat16 half of what float32 keeps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pipetransformer.adapter import shapes_alone
from pipetransformer.config import Config
from pipetransformer.data import describe
from pipetransformer.engine.optim import optimizer_factor
from pipetransformer.errors import UserError
from pipetransformer.models import Chain, TimmModel, build_model
from pipetransformer.pipe.measure.profile import (
    costs_key,
    weight_bytes,
    weights_apart,
)
from pipetransformer.pipe.measure.profile_file import Profile
from pipetransformer.pipe.measure.units import Microbatch, Speeds, count_units
from pipetransformer.pipe.planner.costs import JobCosts, Link, UnitCosts

_BYTES = tuple(name for name in UnitCosts.__dataclass_fields__ if name.endswith("_bytes"))


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a job would run on.

    Attributes:
        speeds: of a device.
        inside: the link between two ranks of a node.
        between: the link of a node to others; None for one node.
        host: the link of a device to its host, where the cache is.
        overlap: how much of the last backward can hide the sum of gradients, 0 to 1.
        memory: bytes of a device that plans may use; None for no limit.
    """

    speeds: Speeds
    inside: Link
    between: Link | None
    host: Link
    overlap: float
    memory: int | None


def profile_of_shapes(config: Config, hardware: Hardware, *, num_ranks: int) -> Profile:
    """The profile of the job of ``config`` on ``num_ranks`` ranks.

    Raises:
        UserError: the model is no chain, or cannot be built for the data.
    """
    share = -(-config.train.batch_size // num_ranks)
    chain, counted = _counted(config, hardware.speeds, rows=share)
    if config.train.precision in ("auto", "bfloat16", "float16"):
        halved: dict[str, Any] = {name: tuple(n // 2 for n in getattr(counted, name)) for name in _BYTES}
        counted = replace(counted, **halved)
    factor, slowest = optimizer_factor(config), hardware.between or hardware.inside
    ring = 2 * (num_ranks - 1) / num_ranks
    job = JobCosts(
        by_rows={share: counted},
        **weight_bytes(chain, config),
        optimizer_factor=factor,
        update_ns_per_byte=(3 + 2 * (factor - 1)) * hardware.speeds.ns_per_byte,
        send=hardware.inside,
        reduction=Link(slowest.latency_ns, ring * max(slowest.ns_per_byte, hardware.inside.ns_per_byte)),
        num_ranks=num_ranks,
        overlap=hardware.overlap,
        between=hardware.between,
        read=hardware.host,
        recompute=config.pipe.recompute,
    )
    key = {**costs_key(config), "device": "shapes alone", "ranks": num_ranks, "torch": torch.__version__}
    return Profile(key, job, {counted.length: counted}, 1e9 / hardware.host.ns_per_byte, hardware.memory)


def _counted(config: Config, speeds: Speeds, *, rows: int) -> tuple[Chain, UnitCosts]:
    built, values = build_model(config, describe(config.data))
    chain = Chain(
        built.model,
        name=config.model.name,
        device=torch.device("cpu"),
        units_per_block=config.pipe.units_per_block,
        values=values,
        fixed=built.fixed,
        rest=torch.bfloat16 if config.model.dtype == "bfloat16" else None,
    )
    length = built.preprocessing.size if isinstance(built, TimmModel) else config.data.max_length
    try:
        with shapes_alone():
            inputs = _inputs(chain, config, rows=rows, length=length)
            chain.assume_shapes(inputs)
            chain.train()
            (costs,) = count_units(
                chain,
                [Microbatch(inputs[chain.family.main_input], inputs, length)],
                units=range(chain.num_units),
                weights_apart=weights_apart(config),
                recompute=config.pipe.recompute,
                speeds=speeds,
            )
    except UserError:
        raise
    except Exception as error:  # models raise any kind of error for inputs that do not fit, or look at values
        said = " ".join(str(error).split())[:200]
        raise UserError(f"model.name: {config.model.name} cannot be counted by its shapes alone ({said})") from error
    return chain, costs


def _inputs(chain: Chain, config: Config, *, rows: int, length: int) -> dict[str, Tensor]:
    """Inputs without values. Note: without a mask, transformers looks at the positions."""
    if chain.family.main_input == "pixel_values":
        return {"pixel_values": torch.empty(rows, describe(config.data).channels or 3, length, length)}
    keys = (chain.family.main_input, *chain.input_keys)
    return {key: torch.empty(rows, length, dtype=torch.int64) for key in keys}
