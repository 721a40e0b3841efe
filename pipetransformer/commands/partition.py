"""Cut a model of the zoo into balanced parts, run them here, and analyse the partition as FTPipe does."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from pipetransformer.analysis.cut import analyse_model
from pipetransformer.arguments import count
from pipetransformer.commands.link import measure_link
from pipetransformer.errors import UserError, writing
from pipetransformer.measure import device_name
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
    parser.add_argument("--microbatches", type=count, help="of the simulated step (default: two for each stage)")
    parser.add_argument(
        "--size", type=count, help="height and width of images, or tokens; the model's own if not given"
    )
    parser.add_argument("--dataset", choices=tuple(_SIZES), help="images of this data set's size, random pixels")
    parser.add_argument("--train-data-file", type=Path, help="text whose words give token ids; else Zipf's law")
    parser.add_argument("--output", help="where to write OUTPUT.txt, .json and .png; auto names them by the model")


def run(arguments: argparse.Namespace) -> None:
    model = zoo_model(arguments.model)
    num_microbatches = arguments.microbatches or 2 * arguments.stages
    if num_microbatches < arguments.stages:
        raise UserError(
            f"--microbatches: {num_microbatches} is fewer than the {arguments.stages} stages that 1F1B fills; give "
            f"at least {arguments.stages}"
        )
    if arguments.dataset is not None and model.kind == "tokens":
        raise UserError(
            f"--dataset: {arguments.dataset} has images and {model.name} reads tokens; give --train-data-file"
        )
    size = arguments.size or _SIZES.get(arguments.dataset)
    if model.kind == "tokens" and size is not None and size > model.size:
        raise UserError(f"--size: {size} is more than the {model.size} tokens that {model.name} reads; give fewer")
    torch.set_num_threads(1)  # as a rank has
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report, graph = analyse_model(
        model,
        device=device,
        batch_size=arguments.batch_size,
        size=size,
        num_stages=arguments.stages,
        iterations=arguments.iterations,
        depth=arguments.depth,
        recompute=not arguments.no_recomputation,
        memory_limit=arguments.memory_limit,
        num_microbatches=num_microbatches,
        token_file=arguments.train_data_file,
        link=measure_link(),
        title=f"pipetransformer {' '.join(arguments.call)}",
        device_name=device_name(device),
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
    with writing(base, key="--output"):
        base.parent.mkdir(parents=True, exist_ok=True)
        base.with_name(f"{base.name}.txt").write_text(f"{text}\n")
        base.with_name(f"{base.name}.json").write_text(json.dumps(report.as_dict(), indent=1) + "\n")
        draw_partition(graph, report, path=base.with_name(f"{base.name}.png"))
    print(f"written to {base}.txt, .json and .png")
