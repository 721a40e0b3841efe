"""Cut a model of the zoo into balanced parts, run them here, and analyse the partition as FTPipe does."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from torch import Tensor

from pipetransformer.commands.ranks import measure_link
from pipetransformer.data import cache_folder
from pipetransformer.errors import UserError, check_folder, writing
from pipetransformer.graphs.analysis.cut import analyse_model
from pipetransformer.graphs.zoo import ZooModel, zoo_model
from pipetransformer.graphs.zoo.words import WIKITEXT, file_words, token_ids, wikitext_words, zipf_ids
from pipetransformer.launch.arguments import count

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
        "--memory-limit",
        type=count,
        metavar="BYTES",
        help="of a part: weights, gradients, AdamW's moments, activations",
    )
    parser.add_argument("--microbatches", type=count, help="of the simulated step (default: two for each stage)")
    parser.add_argument(
        "--size", type=count, help="height and width of images, or tokens; the model's own if not given"
    )
    parser.add_argument(
        "--dataset",
        choices=(*_SIZES, *WIKITEXT),
        help="images of this data set's size, random pixels; or the words of this one as token ids",
    )
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
    name = arguments.output
    if name == "auto":
        name = f"{model.name}_{arguments.stages}p_bs{arguments.batch_size}"
    if name is not None:
        check_folder(Path(name).parent, key="--output")
    example = _example(model, arguments)
    torch.set_num_threads(1)  # as a rank has
    report, graph = analyse_model(
        model,
        example=example,
        num_stages=arguments.stages,
        iterations=arguments.iterations,
        depth=arguments.depth,
        recompute=not arguments.no_recomputation,
        memory_limit=arguments.memory_limit,
        num_microbatches=num_microbatches,
        link=measure_link(),
        title=f"pipetransformer {' '.join(arguments.call)}",
        profiles=cache_folder() / "profiles",
        tell=lambda message: print(message, file=sys.stderr),
    )
    text = report.text()
    print(text)
    if name is None:
        return
    from pipetransformer.commands.pictures import draw_partition

    base = Path(name)
    with writing(base, key="--output"):
        base.with_name(f"{base.name}.txt").write_text(f"{text}\n")
        base.with_name(f"{base.name}.json").write_text(json.dumps(report.as_dict(), indent=1) + "\n")
        draw_partition(graph, report, path=base.with_name(f"{base.name}.png"))
    print(f"written to {base}.txt, .json and .png")


def _example(model: ZooModel, arguments: argparse.Namespace) -> Tensor:
    """The micro-batch that the arguments describe. Raises UserError."""
    dataset, file, batch_size = arguments.dataset, arguments.train_data_file, arguments.batch_size
    if model.kind == "images":
        if file is not None:
            raise UserError(f"--train-data-file: {model.name} reads images; leave it out")
        if dataset in WIKITEXT:
            raise UserError(f"--dataset: {dataset} has words and {model.name} reads images; give {' or '.join(_SIZES)}")
        return model.example(batch_size=batch_size, seed=0, size=arguments.size or _SIZES.get(dataset))
    if dataset in _SIZES:
        raise UserError(
            f"--dataset: {dataset} has images and {model.name} reads tokens; give {' or '.join(WIKITEXT)}, or "
            "--train-data-file"
        )
    length = arguments.size or model.size
    if length > model.size:
        raise UserError(f"--size: {length} is more than the {model.size} tokens that {model.name} reads; give fewer")
    if file is not None and dataset is not None:
        raise UserError(f"--train-data-file: {file} and --dataset {dataset} are two sources of words; leave one out")
    if file is None and dataset is None:
        return zipf_ids(batch_size, length, vocabulary_size=model.vocabulary_size)
    num_words = batch_size * length
    words = wikitext_words(dataset, num_words=num_words) if file is None else file_words(file, num_words=num_words)
    return token_ids(words, batch_size=batch_size, vocabulary_size=model.vocabulary_size)
