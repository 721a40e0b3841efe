"""Tensors that are made without memory, with a record of their values to come.

    with Deferred() as deferred:
        model = make()                 # parameters are on the meta device
    weight = deferred.draw(parameter, generator)   # on the CPU, as ``make`` would have filled it

The memory that ``torch.empty`` would give is left out, and what a constructor then writes into it is noted instead:
random numbers, constants, and copies of tensors that are there, such as those of a mapped file. Whatever else is
computed on the way, as positions and tables are, is computed at once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

# Note: the only base class of a mode that sees every operation; private.
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_EMPTY = (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default)
_LIKE = torch.ops.aten.empty_like.default
# Note: these leave a tensor without memory as it is, or look at what they have drawn.
_LOOKING = ("_no_grad_trunc_normal_", "dirac_", "orthogonal_", "sparse_")


class NotDeferred(Exception):
    """A value depends on one that is not there; ``make`` must be called without deferring."""


@dataclass(frozen=True, slots=True)
class _Change:
    """Something written into a part of a storage: ``write(part, generator)``."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    write: Callable[[Tensor, torch.Generator], object]


class Deferred(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which new tensors have no memory.

    Raises:
        NotDeferred: in it, for what cannot be noted. A constructor that looks at values raises errors of its own.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._changes: dict[int, list[_Change]] = {}
        self._alive: list[torch.UntypedStorage] = []  # so that no number of ``_changes`` is given twice

    def __enter__(self) -> Deferred:
        self._patched = _patched(self._note_function)
        self._patched.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._patched.__exit__(*raised)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (func in _EMPTY and _is_for_weights(kwargs)) or (func is _LIKE and _takes_shape(args[0], kwargs)):
            made = func(*args, **{**kwargs, "device": "meta", "pin_memory": None})
            self._alive.append(made.untyped_storage())
            self._changes[made.untyped_storage()._cdata] = []
            return made
        if args and isinstance(args[0], Tensor) and self._has(args[0]) and _writes_first(func):
            self._note(args[0], func, args[1:], kwargs)
            return args[0]
        return func(*args, **kwargs)

    def knows(self, tensor: Tensor) -> bool:
        """Whether ``draw`` can give the values of ``tensor``."""
        return bool(self._changes.get(tensor.untyped_storage()._cdata))

    def draw(self, tensor: Tensor, generator: torch.Generator) -> Tensor:
        """The values of ``tensor``, on the CPU; random ones come from ``generator``, and in float32 at least.

        Raises:
            NotDeferred: nothing has been written into it, or it was not made in this context.
        """
        if not self.knows(tensor):
            raise NotDeferred("nothing has been written into it")
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        whole = torch.empty(tensor.untyped_storage().nbytes() // tensor.itemsize, dtype=dtype)
        with torch.no_grad():
            for change in self._changes[tensor.untyped_storage()._cdata]:
                change.write(whole.as_strided(change.size, change.stride, change.offset), generator)
        return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def _has(self, tensor: Tensor) -> bool:
        return tensor.is_meta and tensor.untyped_storage()._cdata in self._changes

    def _note(self, written: Tensor, func: Any, args: Any, kwargs: Any) -> None:
        if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves((args, kwargs))):
            raise NotDeferred(f"{func} takes a tensor whose values are not there")
        draws = any(argument.name == "generator" for argument in func._schema.arguments)

        def write(part: Tensor, generator: torch.Generator) -> None:
            func(part, *args, **{**kwargs, **({"generator": generator} if draws else {})})

        self._add(written, write)

    def _note_function(self, initialise: Callable[..., Tensor], tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Notes a call of one of torch's own initialisers."""
        if not self._has(tensor):
            return initialise(tensor, *args, **kwargs)
        given = {key: value for key, value in kwargs.items() if key != "generator"}
        self._add(tensor, lambda part, generator: initialise(part, *args, **given, generator=generator))
        return tensor

    def _add(self, written: Tensor, write: Callable[[Tensor, torch.Generator], object]) -> None:
        place = tuple(written.shape), written.stride(), int(written.storage_offset())
        self._changes[written.untyped_storage()._cdata].append(_Change(*place, write))


def _is_for_weights(kwargs: Mapping[str, Any]) -> bool:
    """Whole numbers are places in tables: what is computed with them must be there."""
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    return dtype.is_floating_point and torch.device(kwargs.get("device") or "cpu").type == "cpu"


def _takes_shape(like: Tensor, kwargs: Mapping[str, Any]) -> bool:
    """Whether memory is wanted for a weight that was only a shape: one that is in none of a library's files."""
    device = kwargs.get("device")
    return like.is_meta and like.is_floating_point() and device is not None and torch.device(device).type == "cpu"


def _writes_first(func: Any) -> bool:
    info = func._schema.arguments[0].alias_info
    return info is not None and info.is_write


@contextmanager
def _patched(note: Callable[..., Tensor]) -> Iterator[None]:
    originals = {name: getattr(nn.init, name) for name in _LOOKING}
    try:
        for name, original in originals.items():
            setattr(nn.init, name, partial(note, original))
        with warnings.catch_warnings():  # a copy into a tensor without memory is no mistake here
            warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter")
            yield
    finally:
        for name, original in originals.items():
            setattr(nn.init, name, original)
