"""The sizes at which the tables are made, and the machines that they speak of."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.support.measure import CONFIGS

__all__ = ["CONFIG", "SCALES", "Scale", "Shape", "kind_of_device", "where"]

CONFIG = CONFIGS / "train_config_digits_no_freeze.yaml"
_ALL_ROWS = "model.head_row_only=false"  # of the last block, as DDP computes them


@dataclass(frozen=True, slots=True)
class Shape:
    """Ranks of this job: pipelines of ``ranks_per_node``, one on each of ``nodes`` (simulated) machines."""

    ranks_per_node: int
    nodes: int

    @property
    def world_size(self) -> int:
        return self.ranks_per_node * self.nodes

    def __str__(self) -> str:
        return f"{self.nodes} x {self.ranks_per_node}"


@dataclass(frozen=True, slots=True)
class Scale:
    """The training that is measured.

    Attributes:
        job: overrides of ``CONFIG``. num_blocks: of its model.
        memory: of a rank, where no GPU sets the limit. most_rows: samples a rank beyond which no batch is tried.
        steps: in a measurement of speed.
        probed: batches of a machine, all blocks frozen.
        state_job: overrides whose weights are much and whose activations are little. state_blocks: of its model.
        timeout_seconds: of a measurement, the building of its model included.
    """

    job: tuple[str, ...]
    num_blocks: int
    memory: str
    most_rows: int
    steps: int
    probed: tuple[int, ...]
    state_job: tuple[str, ...]
    state_blocks: int
    timeout_seconds: float


SCALES = {
    # 32 x 32 pictures in patches of 4: 65 tokens, 0.4 M parameters; state: patches of 8, 17 tokens, 25 M parameters
    "small": Scale(
        job=("model.kwargs={patch_size: 4, embed_dim: 64, depth: 8, num_heads: 4}", "data.image_size=32", _ALL_ROWS),
        num_blocks=8,
        memory="80 MB",
        most_rows=512,
        steps=2,
        probed=(16, 80),
        state_job=(
            "model.kwargs={patch_size: 8, embed_dim: 512, depth: 8, num_heads: 8}",
            "data.image_size=32",
            _ALL_ROWS,
        ),
        state_blocks=8,
        timeout_seconds=600.0,
    ),
    "full": Scale(
        job=(
            _ALL_ROWS,
            *("model.name=vit_base_patch16_224", "model.kwargs={in_chans: 3}", "data.image_size=224"),
            *("train.optimizer=sgd", "data.num_workers=2"),
        ),
        num_blocks=12,
        memory="16 GB",
        most_rows=4096,
        steps=5,
        probed=(64, 320),
        state_job=("model.name=vit_large_patch16_224", "model.kwargs={in_chans: 3}", "data.image_size=224", _ALL_ROWS),
        state_blocks=24,
        timeout_seconds=3600.0,
    ),
}


def kind_of_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def where(shape: Shape) -> str:
    return f"Machines are simulated: all {shape.world_size} ranks are on this one, one thread each."
