"""Tensors with nothing but shapes, which take the paths of real ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

# Note: private; on the meta device, attention would take another path than on a real one.
from torch._subclasses.fake_tensor import FakeTensorMode


@contextmanager
def shapes_alone() -> Iterator[None]:
    """A context in which operations make tensors of the right shapes, types and devices, and compute nothing."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield
