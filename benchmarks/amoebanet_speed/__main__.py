"""torchgpipe's table of AmoebaNet-D's speed: naive-2 and pipelines of 2 to 8, at an equal batch and at its own batches.

    pipetransformer bench amoebanet-speed [--scale small|full|original] [--ranks 8] [--repeats 7]

Batches, micro-batches and checkpointing are those of torchgpipe's examples/amoebanetd_performance_benchmark/main.py at
2535a5a, whose README has the published table: amoebanetd(num_classes=10), which is 4 normal cells a group and 512
filters, 224 x 224 random pixels, SGD. Ours is the same definition of the cells (``cells="ftpipe"``).
"""

from __future__ import annotations

import sys
from functools import partial

from benchmarks.resnet101_speed.original import Original
from benchmarks.resnet101_speed.speed import Published, Size, SpeedTable
from benchmarks.support.graphs import Setting
from pipetransformer.graphs.zoo import zoo_model
from pipetransformer.launch.entry import run_guarded

# Of a cell of the original's sequence; "" copies, adds up or moves tensors.
_CELL = (
    *("from_previous", "", "from_current"),
    *(layer for step in range(5) for layer in (f"operations.{2 * step}", f"operations.{2 * step + 1}", "")),
    *("", "cat"),
)
_NUM_CELLS = 16
_BUILD = zoo_model("amoebanet_4x512_c10").build

TABLE = SpeedTable(
    name="amoebanet-speed",
    title="AmoebaNet-D speed",
    sizes={
        "full": Size(
            model="AmoebaNet-D (4, 512) of 10 classes",
            build=_BUILD,
            image_size=224,
            batch_size=64,
            num_microbatches=16,
            divisor=1,
        ),
        "small": Size(
            model="AmoebaNet-D (1, 32) of 10 classes",
            build=partial(_BUILD, num_layers=3, num_filters=32),
            image_size=64,
            batch_size=64,
            num_microbatches=8,
            divisor=8,
        ),
    },
    rows={
        Setting("naive-2", 2, 47, checkpoint="never"): Published(14.188, 1.000),
        Setting("pipeline-2", 2, 803, 48): Published(20.346, 1.434),
        Setting("pipeline-4", 4, 378, 32): Published(29.074, 2.049),
        Setting("pipeline-8", 8, 216, 32): Published(34.392, 2.424),
    },
    original=Original(
        balances={
            "naive-2": (84, 241),
            "pipeline-2": (144, 181),
            "pipeline-4": (78, 77, 92, 78),
            "pipeline-8": (43, 35, 36, 38, 43, 45, 46, 39),
        },
        layers=[
            *("", "stem.0", "stem.1", ""),
            *(layer and f"cells.{cell}.{layer}".removesuffix(".cat") for cell in range(_NUM_CELLS) for layer in _CELL),
            "classifier",
        ],
        copies_beside=False,  # before its version 0.0.3
    ),
    notes=(
        "naive-2 is the model cut in two, one micro-batch, nothing recomputed: one device waits while the other works. "
        "The original's batches include loading random images; ours lie in memory.",
    ),
    original_notes=(
        "The published rows are of a version before 0.0.3, whose copies and kernels share one stream (its changelog). "
        "A later one, which copies beside computing, published 13.884, 20.334, 30.893 and 42.263 samples/s for the "
        "same settings (88ce76b): pipeline-8 is 1.26 times as fast over naive-2 there.",
        "Not simulated: GPUs that 7 rows of a micro-batch do not fill, where naive-2 has 47, and one Python process "
        "that launches the kernels of all parts.",
    ),
)

if __name__ == "__main__":
    sys.exit(run_guarded(partial(TABLE.main, __file__, description=__doc__ or "")))
