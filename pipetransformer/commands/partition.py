"""Cut a model of the zoo into balanced parts, run them here, and analyse the partition as FTPipe does."""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from pipetransformer.commands.ranks import measure_link
from pipetransformer.data import cache_folder
from pipetransformer.errors import UserError, check_folder, writing
from pipetransformer.graphs.analysis.cut import analyse_model
from pipetransformer.graphs.analysis.printout import Labels, printout
from pipetransformer.graphs.analysis.report import PartitionReport
from pipetransformer.graphs.graph import Graph
from pipetransformer.graphs.zoo import ZOO, ZooModel, zoo_model
from pipetransformer.graphs.zoo.words import WIKITEXT, file_text, tokenizer_ids, wikitext_text, word_ids, zipf_ids
from pipetransformer.launch.arguments import count

_SIZES = {"imagenet": 224, "cifar10": 32, "cifar100": 32}


class _Once(argparse.Action):
    """An option of several names that has one value."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: Any, name: str | None = None) -> None:
        before = getattr(namespace, self.dest)
        if before not in (None, values):
            names = ", ".join(self.option_strings)
            raise UserError(f"{name}: {values} is given, and {before} before it; {names} are one option here")
        setattr(namespace, self.dest, values)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Spellings with underscores are those of FTPipe's scripts, whose options run here as they stand."
    parser.add_argument(
        "--model", help="name in the zoo, e.g. amoebanet_4x512_c10, resnet101 (gpt2 where --train-data-file is given)"
    )
    parser.add_argument(
        *("--batch-size", "--batch_size", "--analysis_batch_size"),
        type=count,
        action=_Once,
        help="samples of a micro-batch, for the cut and for its analysis (default 1)",
    )
    parser.add_argument(*("--stages", "--n_partitions"), type=count, default=4, help="parts to cut into (default 4)")
    parser.add_argument(
        *("--iterations", "--n_iter"), type=count, default=50, help="timed rounds over all parts (default 50)"
    )
    parser.add_argument("--depth", type=count, help="levels of the module tree that units tell apart (default: all)")
    parser.add_argument(
        *("--no-recomputation", "--no_recomputation"),
        action="store_true",
        help="keep activations instead of computing them again",
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
        help="random pixels of this data set's size, the classes being the model's; or the words of this one",
    )
    parser.add_argument(
        *("--train-data-file", "--train_data_file"),
        type=Path,
        metavar="FILE",
        help="text whose words are the token ids, by frequency; without any text, ids are drawn by Zipf's law",
    )
    parser.add_argument(
        "--tokenizer", type=Path, metavar="FOLDER", help="makes the ids of the text instead: of save_pretrained"
    )
    parser.add_argument(
        "--labels",
        choices=get_args(Labels),
        help="of FTPipe's script for vision models (theoretical times are sums) or of that for GPT-2 (sequential and "
        "parallel times, variances); default: by what the model reads. The JSON has all",
    )
    parser.add_argument(
        "--output", help="where to write OUTPUT.txt, .json and .png; auto names them by model, parts and batch size"
    )
    parser.add_argument(
        *("--auto-file-name", "--auto_file_name"),
        action="store_const", const="auto", dest="output",
        help="the same as --output auto",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> None:
    model = model_of(arguments)
    base = _output_base(model, arguments)
    report, graph = analysed(model, arguments)
    labels = arguments.labels or labels_of(model)
    print(printout(report, labels=labels))
    if base is not None:
        _write(report, graph, base=base, labels=labels)
        print(f"written to {base}.txt, .json and .png")


def _write(report: PartitionReport, graph: Graph, *, base: Path, labels: Labels) -> None:
    from pipetransformer.commands.pictures import draw_partition

    with writing(base, key="--output"):
        base.with_name(f"{base.name}.txt").write_text(f"{printout(report, labels=labels)}\n")
        base.with_name(f"{base.name}.json").write_text(json.dumps(report.as_dict(), indent=1) + "\n")
        draw_partition(graph, report, path=base.with_name(f"{base.name}.png"))


def labels_of(model: ZooModel) -> Labels:
    """Those of FTPipe's script for such a model."""
    return "vision" if model.kind == "images" else "gpt2"


def model_of(arguments: argparse.Namespace) -> ZooModel:
    """Raises UserError."""
    if arguments.model is None and arguments.train_data_file is None:
        raise UserError(
            f"--model: none is given; give one of {', '.join(ZOO)} (gpt2 is taken where --train-data-file is given)"
        )
    return zoo_model(arguments.model or "gpt2")


def _output_base(model: ZooModel, arguments: argparse.Namespace) -> Path | None:
    """Of the files that are written, all but their suffix; None: none are. Raises UserError."""
    name = arguments.output
    if name is None:
        return None
    if name == "auto":
        name = f"{model.name}_{arguments.stages}p_bs{_batch_size(arguments)}"
        name += "_no_recomputation" * arguments.no_recomputation
        for given in (arguments.dataset, arguments.labels):
            name += f"_{given}" if given else ""
        for word, number in (("size", arguments.size), ("depth", arguments.depth)):
            name += f"_{word}{number}" if number else ""
    check_folder(Path(name).parent, key="--output")
    return Path(name)


def analysed(model: ZooModel, arguments: argparse.Namespace) -> tuple[PartitionReport, Graph]:
    """The report that the arguments ask for, and the graph that it cuts. Raises UserError."""
    num_microbatches = arguments.microbatches or 2 * arguments.stages
    if num_microbatches < arguments.stages:
        raise UserError(
            f"--microbatches: {num_microbatches} is fewer than the {arguments.stages} stages that 1F1B fills; give "
            f"at least {arguments.stages}"
        )
    example, source = _example(model, arguments)
    torch.set_num_threads(1)  # as a rank has
    return analyse_model(
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
        source=source,
        profiles=cache_folder() / "profiles",
        tell=lambda message: print(message, file=sys.stderr),
    )


def _example(model: ZooModel, arguments: argparse.Namespace) -> tuple[Tensor, str]:
    """The micro-batch that the arguments describe, and its origin. Raises UserError."""
    if model.kind == "images":
        return _images(model, arguments)
    dataset, file, folder = arguments.dataset, arguments.train_data_file, arguments.tokenizer
    if dataset in _SIZES:
        raise UserError(
            f"--dataset: {dataset} has images and {model.name} reads tokens; give {' or '.join(WIKITEXT)}, or "
            "--train-data-file"
        )
    length = arguments.size or model.size
    if length > model.size:
        raise UserError(f"--size: {length} is more than the {model.size} tokens that {model.name} reads; give fewer")
    shape = {"batch_size": _batch_size(arguments), "length": length, "vocabulary_size": model.vocabulary_size}
    if file is not None and dataset is not None:
        raise UserError(f"--train-data-file: {file} and --dataset {dataset} are two sources of words; leave one out")
    if file is None and dataset is None:
        if folder is not None:
            raise UserError(f"--tokenizer: {folder} has no text to read; give --train-data-file")
        return zipf_ids(**shape), "token ids drawn by Zipf's law"
    if file is None:
        read, source = partial(wikitext_text, dataset), f"--dataset: {dataset}"
    else:
        read, source = partial(file_text, file), f"--train-data-file: {file}"
    name = dataset or file
    if folder is None:
        return word_ids(read, **shape, source=source), f"words of {name}, token ids by frequency"
    return tokenizer_ids(read, folder=folder, **shape, source=source), f"tokens of {name} by the tokenizer of {folder}"


def _batch_size(arguments: argparse.Namespace) -> int:
    return arguments.batch_size or 1


def _images(model: ZooModel, arguments: argparse.Namespace) -> tuple[Tensor, str]:
    dataset = arguments.dataset
    for key, value in (("--train-data-file", arguments.train_data_file), ("--tokenizer", arguments.tokenizer)):
        if value is not None:
            raise UserError(f"{key}: {model.name} reads images; leave it out")
    if dataset in WIKITEXT:
        raise UserError(f"--dataset: {dataset} has words and {model.name} reads images; give {' or '.join(_SIZES)}")
    size = arguments.size or _SIZES.get(dataset) or model.size
    images = model.example(batch_size=_batch_size(arguments), seed=0, size=size)
    return images, f"{len(images)} images of {size} x {size} random pixels"
