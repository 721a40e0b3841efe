"""From a model to the report of its best partition: trace, profile, cut, run the parts, analyse."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from pipetransformer.analysis.parts import time_parts
from pipetransformer.analysis.report import PartitionReport, analyse
from pipetransformer.errors import UserError
from pipetransformer.graph import Graph, GraphCosts, profile_graph, trace
from pipetransformer.pipe.costs import Link
from pipetransformer.pipe.partition import partition, smallest_limit
from pipetransformer.zoo import ZooModel

__all__ = ["analyse_model", "cut_graph", "token_ids"]

_PROFILE_REPEATS = 7


def analyse_model(
    model: ZooModel,
    *,
    device: torch.device,
    batch_size: int,
    size: int | None,
    num_stages: int,
    iterations: int,
    depth: int | None,
    recompute: bool,
    memory_limit: int | None,
    num_microbatches: int,
    token_file: Path | None,
    link: Link,
    title: str,
    device_name: str,
) -> tuple[PartitionReport, Graph]:
    """Raises UserError where the model cannot be cut so."""
    torch.manual_seed(0)
    module = model.build().to(device)
    if model.kind == "tokens":
        length = size or model.size
        example = token_ids(batch_size, length, vocabulary_size=model.vocabulary_size, path=token_file)
    else:
        example = model.example(batch_size=batch_size, seed=0, size=size)
    inputs = (example.to(device),)
    graph = trace(module, inputs, depth=depth)
    costs = profile_graph(graph, inputs, repeats=_PROFILE_REPEATS, recompute=recompute)
    boundaries = cut_graph(costs, num_stages=num_stages, link=link, recompute=recompute, memory_limit=memory_limit)
    forward, backward = time_parts(graph, boundaries, inputs, iterations=iterations, recompute=recompute)
    report = analyse(
        graph,
        boundaries,
        costs=costs,
        forward=forward,
        backward=backward,
        link=link,
        recompute=recompute,
        num_microbatches=num_microbatches,
        title=title,
        device=device_name,
        num_parameters=sum(parameter.numel() for parameter in module.parameters()),
    )
    return report, graph


def cut_graph(
    costs: GraphCosts, *, num_stages: int, link: Link, recompute: bool, memory_limit: int | None = None
) -> tuple[int, ...]:
    """The exact min-max cut: forward, recomputation, backward and what is sent both ways.

    Args:
        memory_limit: bytes of weights, gradients and activations that a part may take: of K - part micro-batches as
            1F1B keeps them, or with ``recompute`` of the one that is computed again. What parts receive is not counted.

    Raises:
        UserError: there are fewer units than stages, or nothing fits; names what would.
    """
    num_units = len(costs.forward_ns)
    if num_stages > num_units:
        raise UserError(f"--stages: {num_stages} exceeds the {num_units} units of the model; give at most {num_units}")
    unit_ns = [sum(times) for times in zip(costs.forward_ns, costs.recompute_ns, costs.backward_ns)]
    crossing = [link.ns(sent) + link.ns(returned) for sent, returned in zip(costs.crossing_bytes, costs.returned_bytes)]
    memory = [
        [
            2 * weights + kept * (1 if recompute else num_stages - stage)
            for weights, kept in zip(costs.parameter_bytes, costs.activation_bytes)
        ]
        for stage in range(num_stages)
    ]

    def cut(limit: int | None) -> tuple[int, ...] | None:
        return partition(unit_ns, num_stages=num_stages, crossing=crossing, memory=memory, memory_limit=limit)

    if (boundaries := cut(memory_limit)) is not None:
        return boundaries
    assert memory_limit is not None
    least = smallest_limit(lambda limit: cut(limit) is not None, refused=memory_limit)
    raise UserError(f"--memory-limit: {memory_limit} bytes hold no cut into {num_stages} parts; give at least {least}")


def token_ids(batch_size: int, length: int, *, vocabulary_size: int, path: Path | None) -> Tensor:
    """Ids [batch_size, length] as words of a text fall: of the file's words by frequency, or drawn by Zipf's law."""
    if path is None:
        weights = 1.0 / torch.arange(1, vocabulary_size + 1)
        drawn = torch.multinomial(
            weights, batch_size * length, replacement=True, generator=torch.Generator().manual_seed(0)
        )
        return drawn.reshape(batch_size, length)
    try:
        words = path.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UserError(f"--train-data-file: {path} cannot be read ({reason}); give a text file") from error
    needed = batch_size * length
    if len(words) < needed:
        raise UserError(f"--train-data-file: {path} has {len(words)} words; {needed} are needed")
    return torch.tensor(_by_frequency(words[:needed], vocabulary_size=vocabulary_size)).reshape(batch_size, length)


def _by_frequency(words: Sequence[str], *, vocabulary_size: int) -> list[int]:
    ranks = {word: rank for rank, (word, _) in enumerate(Counter(words).most_common(vocabulary_size - 1))}
    return [ranks.get(word, vocabulary_size - 1) for word in words]
