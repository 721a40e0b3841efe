"""The bytes of real code at sizes that fit no machine: it runs on torch's meta device, where tensors have no data.

    with fake_rank(0, num_ranks=2) as group:         # of as many as wanted, in this process alone
        ...                                          # a stage of ours; what it receives has the right shape
    with fake_devices(live), live:
        gpipe(inputs)                                # torchgpipe; live.place is the device at work

Note: FakeTensorMode, which wraps the same meta tensors, counts a batch too much in what crosses a cut (its tensors die
later than real ones do), takes 1.4 times as long, and belongs to one thread. Counts on the meta device are those of a
real run to the byte: tests/test_gpt2_sweep.py.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.support.caching_allocator import Block, CachingAllocator
from pipetransformer.adapter import LiveBytes

__all__ = [
    "PlacedBytes",
    "attention",
    "cuda_dropout",
    "extend",
    "fake_devices",
    "fake_gradients",
    "fake_rank",
    "follow",
    "short_runs",
]


class PlacedBytes(LiveBytes):
    """``LiveBytes`` of the meta device by place, a device's number.

    Attributes:
        place: of what is made now.
        peaks: by place, the most bytes at once.
        allocators: by place, torch's for CUDA, with what it would have taken from the device.
    """

    def __init__(self) -> None:
        super().__init__(counts_meta=True)
        self.place = 0
        self.peaks: Counter[int] = Counter()
        self.allocators: defaultdict[int, CachingAllocator] = defaultdict(CachingAllocator)
        self._alive: Counter[int] = Counter()
        self._blocks: dict[int, tuple[int, Block | None]] = {}

    def _made(self, key: int, num_bytes: int) -> None:
        super()._made(key, num_bytes)
        place = self.place
        self._blocks[key] = (place, self.allocators[place].take(num_bytes))
        self._alive[place] += num_bytes
        self.peaks[place] = max(self.peaks[place], self._alive[place])

    def _freed(self, key: int, num_bytes: int) -> None:
        super()._freed(key, num_bytes)
        place, block = self._blocks.pop(key)
        self._alive[place] -= num_bytes
        self.allocators[place].give(block)


@contextmanager
def fake_rank(rank: int, *, num_ranks: int) -> Iterator[dist.ProcessGroup]:
    """This process as one rank of many that are not there: what it sends is lost, what it receives has no content."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def fake_gradients(module: nn.Module) -> None:
    """Gives every parameter a gradient, as it has from a first step on."""
    for parameter in module.parameters():
        parameter.grad = torch.empty_like(parameter)


# ---- CUDA's dropout --------------------------------------------------------------------------------------------------


@contextmanager
def cuda_dropout() -> Iterator[None]:
    """Dropout keeps what it keeps on CUDA, a byte a number; on the CPU and the meta device its mask is of the numbers'
    own type. Attention is multiplied out, as where no kernel computes its scores again in the backward.

    For modules that run, and for those that are traced, inside.
    """
    functional = "torch.nn.functional"
    with (
        patch(f"{functional}.dropout", _dropout),
        patch(f"{functional}.scaled_dot_product_attention", lambda *args, **kwargs: attention(*args, **kwargs)),
    ):
        yield


def _dropout(hidden: Tensor, p: float, training: bool, inplace: bool = False) -> Tensor:
    return torch.native_dropout(hidden, p, True)[0] if training and p else hidden


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: None = None, dropout_p: float = 0.0, is_causal: bool = False
) -> Tensor:
    """Causal, multiplied out: the weights of all pairs [..., query, key] are kept, before and after dropout."""
    assert is_causal and attn_mask is None
    scores = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
    causal = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    weights = scores.masked_fill(~causal, float("-inf")).softmax(-1)
    return _dropout(weights, dropout_p, training=True) @ value


# ---- torchgpipe ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Stream:
    device: torch.device


@contextmanager
def fake_devices(live: PlacedBytes) -> Iterator[None]:
    """Runs torchgpipe on devices ``torch.device("meta", 0)``, 1, ...: copies between them are made as between GPUs.

    Its tasks run in this thread, in the order in which it hands them to its workers, one for each device: what they
    make is counted by the mode of this thread. Partitions must be followed (``follow``).
    """

    def device_of(stream: _Stream) -> torch.device:
        live.place = stream.device.index or 0  # what is copied there is its
        return stream.device

    with (
        patch("torchgpipe.stream.is_cuda", lambda stream: False),
        patch("torchgpipe.gpipe.new_stream", _Stream),
        patch("torchgpipe.copy.get_device", device_of),
        patch("torchgpipe.pipeline.spawn_workers", _spawn_none),
    ):
        yield


@contextmanager
def _spawn_none(devices: Sequence[torch.device]) -> Iterator[tuple[list[_Worker], list[_Worker]]]:
    workers = [_Worker() for _ in devices]
    yield workers, workers


class _Worker:
    """Both queues of a worker: a task is done when it is put."""

    def __init__(self) -> None:
        self._done: list[Any] = []

    def put(self, task: Any) -> None:
        self._done.append((True, (task, task.compute())))

    def get(self) -> Any:
        return self._done.pop(0)


def follow(partitions: Sequence[nn.Module], live: PlacedBytes) -> None:
    """Makes ``live.place`` the number of the partition whose forward or backward begins."""
    for place, partition in enumerate(partitions):

        def enter(*_: object, place: int = place) -> None:
            live.place = place

        def leave(module: object, given: object, output: Any, enter: Callable[..., None] = enter) -> None:
            for tensor in output if isinstance(output, tuple) else (output,):
                if tensor.requires_grad:
                    tensor.register_hook(enter)

        partition.register_forward_pre_hook(enter)
        partition.register_forward_hook(leave)


# ---- many micro-batches ----------------------------------------------------------------------------------------------


def short_runs(num_devices: int) -> tuple[int, int, int]:
    """Micro-batches of the runs that a longer one is extended from: more than devices, so that all of these are at work
    at once in each."""
    return (num_devices + 2, num_devices + 3, num_devices + 5)


def extend(measure: Callable[[int], Sequence[int]], num_microbatches: int, *, num_devices: int) -> list[int]:
    """``measure(num_microbatches)``, or, for more than ``short_runs``, the line through those of these where they grow
    by the same bytes with each micro-batch: a long run takes minutes.

    Args:
        measure: bytes of a step of so many micro-batches, all of the same rows.
    """
    first, middle, last = short_runs(num_devices)
    if num_microbatches <= last:
        return list(measure(num_microbatches))
    found = []
    for a, b, c in zip(measure(first), measure(middle), measure(last), strict=True):
        if (b - a) * (last - middle) != (c - b) * (middle - first):
            return list(measure(num_microbatches))
        found.append(c + (b - a) // (middle - first) * (num_microbatches - last))
    return found
