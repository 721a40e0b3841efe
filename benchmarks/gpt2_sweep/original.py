"""The sweep at the original's size, without its machine: bytes counted on the meta device, times simulated.

Bytes are those of a step that finds gradients in place, with dropout as CUDA keeps it. Ours is one rank's stage after
another; torchgpipe is itself.
Step times come from the pipeline's simulator, fitted on the published K 1, M 1 without checkpointing: ours on the rows
of the GPipe that stood beside torchgpipe there ("self"), torchgpipe on its own ("tgp").
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from copy import copy, deepcopy
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpt2_sweep.pipes import Batch, Ours, Torchgpipe, block_cuts, layers_of
from benchmarks.gpt2_sweep.report import MIB, Cell, draw
from benchmarks.support.fake_memory import (
    PlacedBytes,
    attention,
    cuda_dropout,
    fake_devices,
    fake_gradients,
    fake_rank,
    follow,
)
from benchmarks.support.table import Row, write_table
from pipetransformer.graphs.graph import Graph, trace
from pipetransformer.graphs.zoo import zoo_model
from pipetransformer.pipe.planner.step_simulator import StageCosts, simulate

__all__ = ["Original", "Published", "Times", "read_published", "write_original"]

NAMES = {"ours": "self", "torchgpipe": "tgp"}  # here, and in the published file
BYTES_PER_PARAMETER = 12  # the original's "Total Model Parameter Memory": weight, gradient, one state of the optimizer


class Times(NamedTuple):
    forward_s: float
    backward_s: float


class Held(NamedTuple):
    """Bytes of a device. alive: in tensors, at the peak. reserved: taken by torch's allocator to serve them."""

    alive: int
    reserved: int


@dataclass(frozen=True, slots=True)
class Published:
    """One row of the original. reserved_mib: by device, what torch's allocator had taken from it."""

    activation_bytes: int
    total_bytes: int
    times: Times
    samples_per_s: float
    reserved_mib: str


def read_published() -> dict[Cell, Published]:
    ours = {theirs: name for name, theirs in NAMES.items()}
    lines = (Path(__file__).parent / "published.csv").read_text(encoding="utf-8").splitlines()
    found = {}
    for row in csv.DictReader(line for line in lines if not line.startswith("#")):
        k, m, is_checkpointed = int(row["K_partitions"]), int(row["M_microbatches"]), row["checkpoint"] == "True"
        found[Cell(k, m, is_checkpointed, ours[row["implementation"]])] = Published(
            activation_bytes=int(row["peak_activation_bytes"]),
            total_bytes=int(row["total_bytes"]),
            times=Times(float(row["forward_s"]), float(row["backward_s"])),
            samples_per_s=float(row["samples_per_s"]),
            reserved_mib=row["max_reserved_per_device_MiB"],
        )
    return found


class Original:
    """The model on the meta device, and what each cell holds and takes.

    Args:
        batch_size: rows of a step, whatever M is.
        as_published: on CUDA, and ours recomputes the last micro-batch too, as the GPipe beside torchgpipe did: with
            checkpointing it took less memory and a longer backward at M 1. Else as in the sweep on this machine.
    """

    def __init__(self, *, sizes: Mapping[str, int], batch_size: int, as_published: bool = False) -> None:
        self._zoo = zoo_model("gpt2_90m")
        with torch.device("meta"):
            self.model = self._zoo.build(**sizes, dropout=0.1)
        self._length, self._batch_size = sizes["sequence_length"], batch_size
        self._num_blocks = sizes["num_layers"]
        self._graphs: dict[int, Graph] = {}
        self._as_published = as_published

    def on_cpu(self) -> Original:
        """Of the same model."""
        other = copy(self)
        other._as_published, other._graphs = False, {}
        return other

    def parameter_bytes(self, num_stages: int) -> list[int]:
        """Of each partition's weights."""
        edges = self._edges(num_stages)
        layers = layers_of(self.model)
        return [
            sum(p.numel() * p.element_size() for layer in layers[a:b] for p in layer.parameters())
            for a, b in zip(edges, edges[1:])
        ]

    def held(self, cell: Cell) -> list[Held]:
        """By device, above weights and gradients."""
        with cuda_dropout() if self._as_published else nullcontext():
            return self._of_torchgpipe(cell) if cell.implementation == "torchgpipe" else self._of_ours(cell)

    def activation_bytes(self, cell: Cell) -> list[int]:
        """By device, what is alive."""
        return [one.alive for one in self.held(cell)]

    def by_stage(self, cell: Cell) -> list[int]:
        """``activation_bytes`` of ours where it recomputes a stage at once, not block by block."""
        with patch.object(Graph, "segments", lambda graph, units: (units,)):
            return self.activation_bytes(cell)

    def _of_ours(self, cell: Cell) -> list[Held]:
        rows = self._batch_size // cell.num_microbatches
        if rows not in self._graphs:
            self._graphs[rows] = trace(self.model, (self._batch(rows).inputs,), depth=1)
        return [self._of_rank(rank, cell, self._graphs[rows]) for rank in range(cell.num_stages)]

    def _of_rank(self, rank: int, cell: Cell, graph: Graph) -> Held:
        with fake_rank(rank, num_ranks=cell.num_stages) as group:
            pipe = Ours(
                graph,
                self._batch(self._batch_size),
                cuts=block_cuts(self._num_blocks, num_stages=cell.num_stages),
                num_microbatches=cell.num_microbatches,
                checkpoint=self._mode(cell),
                kind="gpipe",
                group=group,
            )
            live = PlacedBytes()
            for stage in pipe.partitions:
                fake_gradients(stage)
            with live:
                pipe.step()
        return Held(live.peak, live.allocators[0].reserved)

    def _of_torchgpipe(self, cell: Cell) -> list[Held]:
        live = PlacedBytes()
        with fake_devices(live):
            pipe = Torchgpipe(
                layers_of(deepcopy(self.model)),
                self._batch(self._batch_size),
                cuts=block_cuts(self._num_blocks, num_stages=cell.num_stages),
                num_microbatches=cell.num_microbatches,
                checkpoint=self._mode(cell),
                devices=[torch.device("meta", place) for place in range(cell.num_stages)],
            )
            follow(pipe.partitions, live)
            for partition in pipe.partitions:
                fake_gradients(partition)
            with live:
                pipe.step()
        return [Held(live.peaks[place], live.allocators[place].reserved) for place in range(cell.num_stages)]

    def times(self, cell: Cell, fitted: Times) -> Times:
        """Of a step, simulated: links cost nothing, micro-batches cost their share.

        Args:
            fitted: of K 1, M 1 without checkpointing.
        """
        m = cell.num_microbatches
        again = {"never": 0.0, "except_last": (m - 1) / m, "always": 1.0}[self._mode(cell)]
        stages = [
            StageCosts(
                round(1e9 * share * fitted.forward_s / m),
                round(1e9 * share * (fitted.backward_s + again * fitted.forward_s) / m),
            )
            for share in self._shares(cell.num_stages)
        ]
        step = simulate("gpipe", stages, num_ranks=cell.num_stages, num_microbatches=m)
        forward = max(span.stop for span in step.spans if span.work.kind == "F")
        return Times(forward / 1e9, (step.compute - forward) / 1e9)

    def _shares(self, num_stages: int) -> list[float]:
        """Of each partition in the operations of a forward."""
        edges = self._edges(num_stages)
        operations = self._operations()
        return [sum(operations[a:b]) / sum(operations) for a, b in zip(edges, edges[1:])]

    def _operations(self) -> list[int]:
        found, hidden = [], self._batch(1).inputs.float()
        for layer in layers_of(self.model):
            with FlopCounterMode(display=False) as counter:
                hidden = layer(hidden)
            found.append(counter.get_total_flops())
        return found

    def _edges(self, num_stages: int) -> list[int]:
        """First layers of the partitions, layer 0 being the embedding, and the number of layers."""
        return [0, *(1 + cut for cut in block_cuts(self._num_blocks, num_stages=num_stages)), self._num_blocks + 2]

    def _batch(self, rows: int) -> Batch:
        ids = torch.empty(rows, self._length, dtype=torch.long, device="meta")
        return Batch(ids, ids)

    def _mode(self, cell: Cell) -> str:
        if not cell.is_checkpointed:
            return "never"
        return "always" if self._as_published and cell.implementation == "ours" else "except_last"


# ---- the table -------------------------------------------------------------------------------------------------------


def write_original(cells: Sequence[Cell], *, sizes: Mapping[str, int], batch_size: int, folder: Path) -> None:
    """Prints and writes ``gpt2-sweep-original``."""
    original, published = Original(sizes=sizes, batch_size=batch_size, as_published=True), read_published()
    rows = []
    for cell in cells:
        rows.append(row_of(cell, original, published=published, batch_size=batch_size))
        print(f"{cell}: {rows[-1]['peak_activation_bytes']:,} bytes", flush=True)
    number = sum(p.numel() for p in original.model.parameters())
    notes = [f"{number:,} parameters, batch {batch_size}, dropout 0.1; use_resnet is False in all rows.", *NOTES]
    title = "A GPT of 90 M parameters: K stages, M micro-batches, checkpointing, beside the original"
    write_table(
        "gpt2-sweep-original",
        rows,
        title=title,
        notes=[*notes, *errors(rows), dropout_note(original)],
        draw=lambda to: draw(to, drawn(rows)),
        folder=folder,
    )


def row_of(cell: Cell, original: Original, *, published: Mapping[Cell, Published], batch_size: int) -> Row:
    weights, held = original.parameter_bytes(cell.num_stages), original.held(cell)
    activations = [one.alive for one in held]
    model = [BYTES_PER_PARAMETER * num_bytes // 4 for num_bytes in weights]
    there, fitted = published[cell], published[Cell(1, 1, False, cell.implementation)].times
    is_ours = cell.implementation == "ours"
    times = original.times(cell, fitted)
    return {
        "K_partitions": cell.num_stages,
        "M_microbatches": cell.num_microbatches,
        "checkpoint": str(cell.is_checkpointed),
        "implementation": cell.implementation,
        "peak_activation_bytes": sum(activations),
        "published": there.activation_bytes,
        "over published": sum(activations) / there.activation_bytes,
        "reserved_bytes": sum(one.reserved for one in held),
        "reserved over published": sum(one.reserved for one in held) / there.activation_bytes,
        "recomputed by stage": sum(original.by_stage(cell)) if cell.is_checkpointed and is_ours else None,
        "total_bytes": sum(activations) + sum(model),
        "published total": there.total_bytes,
        "parameter_bytes": " ".join(map(str, weights)),
        "model_bytes": sum(model),
        "published model": there.total_bytes - there.activation_bytes,
        "total_per_device_MiB": " ".join(f"{(a + b) / MIB:.0f}" for a, b in zip(activations, model)),
        "published reserved MiB": there.reserved_mib,
        "forward_s": times.forward_s,
        "published forward_s": there.times.forward_s,
        "backward_s": times.backward_s,
        "published backward_s": there.times.backward_s,
        "samples_per_s": batch_size / sum(times),
        "published samples_per_s": there.samples_per_s,
    }


def drawn(rows: Sequence[Row]) -> list[Row]:
    """The rows for the picture, the published ones behind ours; memory of both as torch's allocator reserves it."""
    published = {"ours": "published, the original's own", "torchgpipe": "published, torchgpipe"}
    found: list[Row] = []
    for row in rows:
        total = int(row["reserved_bytes"] or 0) + int(row["model_bytes"] or 0)
        found.append({**row, "total_bytes": total})
    for row in rows:
        figures = {"samples_per_s": row["published samples_per_s"], "total_bytes": row["published total"]}
        found.append({**row, "implementation": published[str(row["implementation"])], **figures})
    return found


NOTES = (
    "peak_activation_bytes: of tensors alive above weights and gradients in a step that finds gradients in place, of "
    "each device at its own peak, counted on torch's meta device; dropout keeps a byte a number, as on CUDA, and "
    "attention is multiplied out. reserved_bytes: what torch's CUDA allocator takes to serve these, by its rules. The "
    "original takes what it had reserved on its devices, less 12 bytes a parameter. total_bytes: with these, on both "
    "sides.",
    "K 1 of ours is gradient accumulation: a backward follows each forward, and one micro-batch is alive. With "
    "checkpointing ours recomputes all micro-batches, as self did, block by block (recomputed by stage: activations "
    "where a stage is recomputed at once); torchgpipe recomputes all but the last.",
    "Times: the simulator's, fitted on the published K 1, M 1, checkpoint False of self for ours, of tgp for "
    "torchgpipe; partitions by counted operations, micro-batches in proportion to rows, links cost nothing.",
)


def dropout_note(original: Original) -> str:
    """What dropout and attention keep, by running the step in one piece otherwise."""
    cell = Cell(1, 1, False, "torchgpipe")
    found = {"as here": sum(original.activation_bytes(cell))}
    for name, other in (("nothing dropped in attention", _undropped), ("no scores kept", _scoreless)):
        with patch("benchmarks.support.fake_memory.attention", other):
            found[name] = sum(original.activation_bytes(cell))
    found["a mask of 4 bytes a number, as on the CPU"] = sum(original.on_cpu().activation_bytes(cell))
    said = "; ".join(f"{name}: {num_bytes:,} bytes" for name, num_bytes in found.items())
    return f"K 1, M 1, torchgpipe, measured: {said}."


def _undropped(query: Tensor, key: Tensor, value: Tensor, *, dropout_p: float, **others: bool) -> Tensor:
    return attention(query, key, value, **others)  # type: ignore[arg-type]


def _scoreless(query: Tensor, key: Tensor, value: Tensor, **_: object) -> Tensor:
    """Of the same inputs and output as a kernel's that computes scores again."""
    return query + key + value


def errors(rows: Sequence[Row]) -> list[str]:
    """Of the figures beside the published ones, by what they are of."""
    said = []
    for name in NAMES:
        for checkpoint in ("False", "True"):
            for kind, chosen in (
                ("K 1", [r for r in rows if r["K_partitions"] == 1]),
                ("K 2 and 4", [r for r in rows if r["K_partitions"] != 1]),
            ):
                mine = [r for r in chosen if (r["implementation"], r["checkpoint"]) == (name, checkpoint)]
                if mine:
                    ratios, kept = (
                        [float(r[key] or 0) for r in mine] for key in ("over published", "reserved over published")
                    )
                    rates = [float(r["samples_per_s"] or 0) / float(r["published samples_per_s"] or 1) for r in mine]
                    said.append(
                        f"{name}, {kind}, checkpoint {checkpoint}: activations {min(ratios):.2f} .. {max(ratios):.2f} "
                        f"of the published (mean {mean(ratios):.2f}), reserved {min(kept):.2f} .. {max(kept):.2f} "
                        f"(mean {mean(kept):.2f}); samples/s {min(rates):.2f} .. {max(rates):.2f}."
                    )
    return said
