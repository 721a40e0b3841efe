"""torchgpipe's table of ResNet-101's speed: naive-1 and pipelines of 1 to 8, at an equal batch and at its own batches.

    pipetransformer bench resnet101-speed [--scale small|full|original] [--ranks 8] [--repeats 7]

Batches, micro-batches and checkpointing are those of torchgpipe's examples/resnet101_speed_benchmark/main.py at
d22035b, whose README has the published table: 10 classes, 224 x 224 random pixels, SGD.
"""

from __future__ import annotations

import sys
from functools import partial

from benchmarks.resnet101_speed.original import Original
from benchmarks.resnet101_speed.speed import Published, Size, SpeedTable
from benchmarks.support.graphs import Setting
from pipetransformer.graphs.zoo import zoo_model
from pipetransformer.launch.entry import run_guarded

# Of a block of the original's sequence; "" copies the input for the shortcut.
_BLOCK = ("", "conv1", "bn1", "act1", "conv2", "bn2", "act2", "conv3", "bn3", "downsample", "act3")
_GROUPS = (3, 4, 23, 3)
_BUILD = zoo_model("resnet101").build

TABLE = SpeedTable(
    name="resnet101-speed",
    title="ResNet-101 speed",
    sizes={
        "full": Size(
            model="ResNet-101 of 10 classes",
            build=partial(_BUILD, num_classes=10),
            image_size=224,
            batch_size=128,
            num_microbatches=16,
            divisor=1,
        ),
        "small": Size(
            model="a ResNet of 12 blocks with 16 to 128 channels",
            build=partial(_BUILD, num_classes=10, layers=(2, 3, 5, 2), channels=(16, 32, 64, 128)),
            image_size=64,
            batch_size=64,
            num_microbatches=8,
            divisor=32,
        ),
    },
    rows={
        Setting("naive-1", 1, 96, checkpoint=None): Published(92.539, 1.000),
        Setting("pipeline-1", 1, 96, checkpoint="always"): Published(69.960, 0.756),
        Setting("pipeline-2", 2, 4096, 256): Published(137.788, 1.489),
        Setting("pipeline-4", 4, 4096, 256): Published(243.322, 2.629),
        Setting("pipeline-8", 8, 4096, 64): Published(404.084, 4.367),
    },
    original=Original(
        balances={
            "pipeline-2": (140, 230),
            "pipeline-4": (47, 96, 118, 109),
            "pipeline-8": (26, 22, 33, 44, 44, 66, 66, 69),
        },
        layers=[
            *("conv1", "bn1", "act1", "maxpool"),
            *(
                layer and f"layer{group}.{block}.{layer}"
                for group, number in enumerate(_GROUPS, start=1)
                for block in range(number)
                for layer in _BLOCK
            ),
            *("global_pool", "", "fc"),
        ],
        copies_beside=True,
    ),
    notes=(
        "naive-1 is the model itself; pipeline-1 adds recomputation, of which it has nothing, as its published row "
        "says: at the original's batch of every activation, at an equal batch of all micro-batches but the last.",
    ),
    original_notes=(
        "By counted work the second part of the original's pipeline-2 is the longer one. It measured its balance where "
        "it ran: there the early layers, large pictures of few channels, took longer than their operations and memory "
        "say.",
        "Not simulated: GPUs that micro-batches of 16 rows fill less than naive-1's 96, and one Python process that "
        "launches the kernels of all parts.",
    ),
)

if __name__ == "__main__":
    sys.exit(run_guarded(partial(TABLE.main, __file__, description=__doc__ or "")))
