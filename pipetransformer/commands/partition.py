"""Cut a model of the zoo into balanced parts, run them here, and analyse the partition as FTPipe does."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path

from pipetransformer.commands.arguments import count
from pipetransformer.commands.link import measure_link
from pipetransformer.errors import writing
from pipetransformer.zoo import zoo_model

__all__ = ["add_arguments", "run"]

_SIZES = {"imagenet": 224, "cifar10": 32, "cifar100": 32}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="name in the zoo, e.g. amoebanet_4x512_c10, gpt2, resnet101")
    parser.add_argument("--batch-size", type=count, default=1, help="samples of a micro-batch (default 1)")
    parser.add_argument("--stages", type=count, default=4, help="parts to cut into (default 4)")
    parser.add_argument("--iterations", type=count, default=50, help="timed rounds over all parts (default 50)")
    parser.add_argument("--depth", type=count, help="levels of the module tree that units tell apart (default: all)")
    parser.add_argument(
        "--no-recomputation", action="store_true", help="keep activations instead of computing them again"
    )
    parser.add_argument(
        "--memory-limit", type=count, metavar="BYTES", help="of a part: weights, gradients, activations"
    )
    parser.add_argument("--microbatches", type=count, default=8, help="of the simulated step (default 8)")
    parser.add_argument(
        "--size", type=count, help="height and width of images, or tokens; the model's own if not given"
    )
    parser.add_argument("--dataset", choices=tuple(_SIZES), help="images of this data set's size, random pixels")
    parser.add_argument("--train-data-file", type=Path, help="text whose words give token ids; else Zipf's law")
    parser.add_argument("--output", help="where to write OUTPUT.txt, .json and .png; auto names them by the model")


def run(arguments: argparse.Namespace) -> None:
    model = zoo_model(arguments.model)
    import torch

    from pipetransformer.analysis.cut import analyse_model

    torch.set_num_threads(1)  # as a rank has
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    title = "pipetransformer partition " + " ".join(sys.argv[2:])
    report, graph = analyse_model(
        model,
        device=device,
        batch_size=arguments.batch_size,
        size=arguments.size or _SIZES.get(arguments.dataset),
        num_stages=arguments.stages,
        iterations=arguments.iterations,
        depth=arguments.depth,
        recompute=not arguments.no_recomputation,
        memory_limit=arguments.memory_limit,
        num_microbatches=arguments.microbatches,
        token_file=arguments.train_data_file,
        link=measure_link(),
        title=title,
        device_name=torch.cuda.get_device_name()
        if device.type == "cuda"
        else f"CPU {platform.processor() or platform.machine()}",
    )
    text = report.text()
    print(text)
    if arguments.output is None:
        return
    from pipetransformer.pictures import draw_partition

    name = arguments.output
    if name == "auto":
        name = f"{model.name}_{arguments.stages}p_bs{arguments.batch_size}"
    base = Path(name)
    with writing(base):
        base.parent.mkdir(parents=True, exist_ok=True)
        base.with_name(f"{base.name}.txt").write_text(f"{text}\n")
        base.with_name(f"{base.name}.json").write_text(json.dumps(report.as_dict(), indent=1) + "\n")
        draw_partition(graph, report, path=base.with_name(f"{base.name}.png"))
    print(f"written to {base}.txt, .json and .png")
