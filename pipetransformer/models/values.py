"""The weights of a model before training, one by one: read from its files, or drawn at random.

Each depends on the seed and its name alone, so that any rank can have any of them, whoever else holds what.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from pipetransformer.adapter import Deferred, NotDeferred
from pipetransformer.data import cache_folder


class _Built(Protocol):
    model: nn.Module


Built = TypeVar("Built", bound=_Built)


class Values:
    """The weights of ``model``, which was built in ``deferred``, if not None.

    Those that are in memory, or in a mapped file, stay there. Its buffers, which every rank needs, are filled at once.

    Attributes:
        bytes_read: bytes of the weights that were asked for so far, as often as they were, and were not drawn.

    Raises:
        NotDeferred: one of them is not known.
    """

    def __init__(self, model: nn.Module, *, deferred: Deferred | None, seed: int) -> None:
        self._sources: dict[str, partial[Tensor]] = {}
        self.bytes_read = 0
        for name, parameter in model.named_parameters():
            held = parameter.detach()
            if not held.is_meta:
                self._sources[name] = partial(_itself, held)
            elif deferred is not None and deferred.knows(held):
                own = name.replace(".base_layer.", ".")  # peft's: the base is the same with adapters and without
                self._sources[name] = partial(_drawn, deferred, held, seed=seed, name=own)
            else:
                raise NotDeferred(f"nothing is known of {name}")
        for path, module in model.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_meta and deferred is not None:
                    drawn = _drawn(deferred, buffer, seed=seed, name=f"{path}.{name}")
                    setattr(module, name, drawn.to(buffer.dtype))

    def read_types(self) -> set[torch.dtype]:
        """The types of the weights that are not drawn."""
        return {source.args[0].dtype for source in self._sources.values() if source.func is _itself}

    def of(self, name: str) -> Tensor:
        """The weight of this name, on the CPU, in the type that it was saved or made in."""
        source = self._sources[name]
        weight = source()
        self.bytes_read += weight.nbytes if source.func is _itself else 0
        return weight

    def put(self, name: str, weight: Tensor) -> None:
        """Takes a copy of ``weight`` in the place of the weight of this name: in the host's memory, or in a file where
        the weight itself is there."""
        self._sources[name] = partial(_itself, _in_file(weight) if weight.device.type == "cpu" else weight.cpu())


def built_with_values(build: Callable[[], Built], *, seed: int) -> tuple[Built, Values]:
    """What ``build`` gives, its model's weights on the meta device, and these weights.

    A model whose constructor looks at its own weights is built whole, in the host's memory.
    """
    torch.manual_seed(seed)
    deferred = Deferred()
    try:
        with deferred:
            built = build()
        return built, Values(built.model, deferred=deferred, seed=seed)
    except Exception:  # of any library, about weights that are not there, or of ``build`` itself: it tells again below
        torch.manual_seed(seed)
        built = build()
        return built, Values(built.model, deferred=None, seed=seed)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _drawn(deferred: Deferred, tensor: Tensor, *, seed: int, name: str) -> Tensor:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return deferred.draw(tensor, torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1))


def _in_file(weight: Tensor) -> Tensor:
    """A copy in a mapped file without a name, whose pages the system writes out for want of memory; in memory where
    there is no room on disk."""
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache_folder()) as file:
            os.posix_fallocate(file.fileno(), 0, max(weight.nbytes, 1))  # Note: else a full disk would kill the process
            mapped = np.memmap(file, dtype=np.uint8, mode="r+", shape=(weight.nbytes,)) if weight.nbytes else None
    except OSError:
        return weight.clone()
    if mapped is None:
        return weight.clone()
    copy = torch.from_numpy(mapped).view(weight.dtype).view(weight.shape)
    return copy.copy_(weight)


def empty(model: nn.Module, *, device: torch.device, dtype: torch.dtype) -> None:
    """Leaves nothing but shapes of the parameters, and moves the buffers; tensors that are one stay one."""
    shapes: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter not in shapes:
                shapes[parameter] = nn.Parameter(torch.empty_like(parameter, dtype=dtype, device="meta"))
            setattr(module, name, shapes[parameter])
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if buffer not in shapes:
                shapes[buffer] = buffer.to(device=device, dtype=dtype if buffer.is_floating_point() else buffer.dtype)
            setattr(module, name, shapes[buffer])


@contextmanager
def during_forward(modules: Sequence[nn.Module], lend: Callable[[int], AbstractContextManager[None]]) -> Iterator[None]:
    """Enters, as a context, ``lend(i)`` for the time of each forward of ``modules[i]``; they do not call each other."""
    lending = ExitStack()

    def begin(index: int, *_: object) -> None:
        lending.enter_context(lend(index))

    def end(*_: object) -> None:
        lending.close()

    with lending, ExitStack() as hooks:
        for index, module in enumerate(modules):
            hooks.callback(module.register_forward_pre_hook(partial(begin, index)).remove)
            hooks.callback(module.register_forward_hook(end).remove)
        yield
