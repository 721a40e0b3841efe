"""Weights into safetensors files one after another, in the layout of the libraries' folders.

safetensors itself writes a file from tensors that are all in memory; here one of them is at a time. The format is a
header's length (8 bytes, little-endian), the header (JSON: type, shape and place of each tensor) and the tensors
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor, nn

LARGEST_SHARD = 5 * 10**9
"""Bytes of a file where there are several: as many as hubs take without a special upload."""

_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name; of parameters the shapes alone, in the widest type of any."""
    held, state = dict(model.named_parameters()), model.state_dict()
    widest = max((parameter.dtype for parameter in held.values()), key=lambda dtype: dtype.itemsize)
    parameters = {name: torch.empty(parameter.shape, dtype=widest, device="meta") for name, parameter in held.items()}
    return {**parameters, **{name: buffer for name, buffer in model.named_buffers() if name in state}}


def write_weights(
    folder: Path,
    weights: Iterable[tuple[str, Tensor]],
    *,
    like: Mapping[str, Tensor],
    largest: int | None = None,
    stem: str = "model",
) -> None:
    """Writes ``STEM.safetensors``, or shards of it and ``STEM.safetensors.index.json``.

    Args:
        weights: name and tensor of each of ``like``, on the CPU, in any order; one is let go before the next is taken.
        like: tensors of the same shapes and types by name, in the order of the files; their values do not matter.
        largest: most bytes of a file, but for a tensor that is larger; None for one file of all.
        stem: name of the file, without what follows its first point.

    Raises:
        OSError: a file cannot be written.
    """
    shards = _shards(like, largest)
    names = [_file_name(stem, number, len(shards)) for number in range(1, len(shards) + 1)]
    missing = set(like)
    with ExitStack() as stack:
        file: BinaryIO
        places: dict[str, tuple[BinaryIO, int]] = {}
        for name, shard in zip(names, shards):
            header, within = _header_of(shard)
            file = stack.enter_context((folder / name).open("wb"))
            file.write(header)
            places |= {key: (file, len(header) + place) for key, place in within.items()}
        for key, tensor in weights:
            assert (tensor.shape, tensor.dtype) == (like[key].shape, like[key].dtype), key
            file, place = places[key]
            file.seek(place)
            file.write(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            missing.remove(key)
    assert not missing, missing
    if len(shards) > 1:
        sizes = {"total_size": sum(tensor.nbytes for tensor in like.values())}
        files = {key: name for name, shard in zip(names, shards) for key in shard}
        index = json.dumps({"metadata": sizes, "weight_map": files}, indent=2)
        (folder / f"{stem}.safetensors.index.json").write_text(index + "\n")


def _shards(like: Mapping[str, Tensor], largest: int | None) -> Sequence[Mapping[str, Tensor]]:
    """As few as the order allows; a tensor that is larger than a file may be has one of its own."""
    shards: list[dict[str, Tensor]] = [{}]
    num_bytes = 0
    for key, tensor in like.items():
        if largest is not None and shards[-1] and num_bytes + tensor.nbytes > largest:
            shards.append({})
            num_bytes = 0
        shards[-1][key] = tensor
        num_bytes += tensor.nbytes
    return shards


def _file_name(stem: str, number: int, of: int) -> str:
    return f"{stem}.safetensors" if of == 1 else f"{stem}-{number:05d}-of-{of:05d}.safetensors"


def _header_of(shard: Mapping[str, Tensor]) -> tuple[bytes, Mapping[str, int]]:
    """The header with its length, and the place of each tensor behind it.

    The widest numbers come first, and the header is padded to 8 bytes, so that all are aligned where a file is mapped
    into memory.
    """
    told: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts, end = {}, 0
    for key, tensor in sorted(shard.items(), key=lambda item: -item[1].itemsize):
        starts[key], end = end, end + tensor.nbytes
        told[key] = {"dtype": _TYPES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [starts[key], end]}
    text = json.dumps(told).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, starts
