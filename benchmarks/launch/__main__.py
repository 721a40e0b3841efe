"""From launch to the first step of a model of 1.1 billion weights, and what each rank reads and holds.

    pipetransformer bench launch [--repeats 3]

A Llama of 24 blocks, drawn at random and saved in bfloat16 in several files, on 1, 2 and 4 ranks of one thread.
Adapters train in the last quarter of the blocks; the three quarters before it rest in bfloat16 (model.dtype), on every
rank, or, where a memory limit leaves no other way, in the stages of the pipeline. Each launch is a job of its own:
processes, libraries, data, proof of the model, plan, weights, one step; units are counted, not timed. The files are in
the system's cache of files throughout.

Read: bytes of weights that a rank took from the files, over those of the units that its plan gives it. Anonymous: the
memory of the process that no file backs, when the first step is done.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from time import time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.support.command_line import add_output, bench_parser
from benchmarks.support.measure import CONFIGS, spread
from benchmarks.support.ranks import as_ranks, is_rank
from benchmarks.support.table import Row, write_table
from pipetransformer.config import load_config
from pipetransformer.launch.arguments import count
from pipetransformer.launch.entry import run_guarded
from pipetransformer.models.weight_files import write_weights
from pipetransformer.process.world import World
from pipetransformer.run import events
from pipetransformer.trainer import Trainer

RANKS, BLOCKS, LAST = (1, 2, 4), 24, 6
SIZES = {
    **{"vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": BLOCKS},
    **{"num_attention_heads": 32, "num_key_value_heads": 4, "pad_token_id": 0, "num_labels": 2},
}
SETTINGS = (
    *(
        "model.pretrained=true",
        "model.kwargs={}",
        "model.dtype=bfloat16",
        f"model.lora.blocks={LAST}",
        "train.precision=bfloat16",
    ),
    *("train.wide_attention=0", "train.batch_size=8", "data.max_train_samples=64", "pipe.measure=false"),
    *("cache.enabled=false", "checkpoint.every=null", "log.wandb=disabled", "run.id=launch"),
)
_FOLDER, _BEGAN, _LIMIT = (f"PIPETRANSFORMER_LAUNCH_{name}" for name in ("FOLDER", "BEGAN", "LIMIT"))  # to the ranks


class FirstStep(Exception):
    """The first step is done."""


def main() -> None:
    parser = bench_parser("launch", description=__doc__)
    parser.add_argument("--repeats", type=count, default=3, help="launches of each kind")
    add_output(parser)
    arguments = parser.parse_args()
    if is_rank():
        as_ranks(__file__, launched, num_ranks=1)
        return
    with tempfile.TemporaryDirectory() as scratch:
        num_bytes = write_model(Path(scratch) / "model")
        found: dict[tuple[int, bool], list[list[dict[str, Any]]]] = {}
        for _ in range(arguments.repeats):
            for num_ranks in RANKS:
                for is_limited in (False, True) if num_ranks > 1 else (False,):
                    found.setdefault((num_ranks, is_limited), []).append(
                        launch(Path(scratch), num_ranks, limit=limit_of(num_bytes, num_ranks) if is_limited else None)
                    )
        rows = [row_of(key, launches) for key, launches in found.items()]
    notes = [
        f"{num_bytes / 2e9:.2f} billion weights, {num_bytes / 1e9:.2f} GB of files. Seconds: median with the least and "
        f"the most of {arguments.repeats} launches in turn; bytes: of the rank with the most, and of all ranks."
    ]
    title = "From launch to the first step of a model of a billion weights"
    write_table("launch", rows, title=title, notes=notes, draw=partial(draw, rows=rows), folder=arguments.output)


def write_model(folder: Path) -> int:
    """Writes the model and its tokenizer. Returns the bytes of the weights."""
    from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast

    from pipetransformer.data import describe

    info = describe(load_config(CONFIGS / "train_config_demo_text.yaml").data)
    with torch.device("meta"):
        model = LlamaForSequenceClassification(LlamaConfig(**SIZES)).to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.config.save_pretrained(folder)
    names = {f"{role}_token": f"[{role.upper()}]" for role in ("pad", "unk", "cls", "sep", "mask")}
    tokens = Path(folder) / "tokenizer.json"
    tokens.write_text(info.tokenizer)
    PreTrainedTokenizerFast(tokenizer_file=str(tokens), **names).save_pretrained(folder)
    like, random = dict(model.named_parameters()), torch.Generator().manual_seed(0)
    drawn = (
        (name, (torch.randn(tensor.shape, generator=random) * 0.02 + (tensor.ndim == 1)).to(torch.bfloat16))
        for name, tensor in like.items()
    )
    write_weights(folder, drawn, like=like, largest=5 * 10**8)
    return sum(tensor.nbytes for tensor in like.values())


def limit_of(num_bytes: int, num_ranks: int) -> int:
    """Bytes that hold a rank's share of the weights, those that train in float32, and activations; not the whole prefix
    beside them."""
    share = LAST / BLOCKS
    return round((num_bytes * (1 - share) + 2 * num_bytes * share) / num_ranks * 1.2 + 4e8)


def launch(scratch: Path, num_ranks: int, *, limit: int | None) -> list[dict[str, Any]]:
    """The figures of each rank of one launch."""
    os.environ |= {_FOLDER: str(scratch), _BEGAN: str(time()), _LIMIT: str(limit or "")}
    as_ranks(__file__, launched, num_ranks=num_ranks)
    return json.loads((scratch / "ranks.json").read_text())  # type: ignore[no-any-return]


def launched(world: World) -> None:
    """A rank, up to its first step."""
    scratch, began, limit = Path(os.environ[_FOLDER]), float(os.environ[_BEGAN]), os.environ[_LIMIT]
    own = [f"model.name={scratch / 'model'}", f"run.dir={scratch / 'runs'}", "run.overwrite=true"]
    own += [f"pipe.memory_limit={limit}"] if limit else []

    def stop(event: events.Event) -> None:
        if isinstance(event, events.Stepped):
            raise FirstStep

    trainer = Trainer(load_config(CONFIGS / "train_config_demo_text.yaml", [*SETTINGS, *own]), world, listeners=[stop])
    try:
        trainer.run()
    except FirstStep:
        seconds = time() - began
    chain, plan = trainer.job.chain, trainer.engine.plan
    held = [unit for unit, ranks in plan.holders().items() if world.rank in ranks]
    # In the files, base weights are of two bytes a number, and adapters are not there.
    named = {n: p for n, p in chain.named_parameters(held).items() if "lora_" not in n}
    mine = {
        "seconds": seconds,
        "read": trainer.job.values.bytes_read,
        "owned": sum(2 * parameter.numel() for parameter in named.values()),
        "held": sum(parameter.nbytes for parameter in chain.named_parameters(held).values()),
        "anonymous": _anonymous_bytes(),
        "layout": f"{plan.pp} x {plan.dp}",
        "prefix": plan.prefix,
        "frozen": plan.frozen,
    }
    everyone: list[dict[str, Any]] = [{}] * world.size
    dist.all_gather_object(everyone, mine)
    if world.rank == 0:
        (scratch / "ranks.json").write_text(json.dumps(everyone))


def _anonymous_bytes() -> int:
    """The present ones: the kernel keeps no maximum of these alone."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


def row_of(key: tuple[int, bool], launches: list[list[dict[str, Any]]]) -> Row:
    num_ranks, is_limited = key
    first = launches[0]
    seconds = [max(rank["seconds"] for rank in ranks) for ranks in launches]
    row: Row = {
        "ranks": num_ranks,
        "limit": "yes" if is_limited else "no",
        "pp x dp": first[0]["layout"],
        "prefix": first[0]["prefix"],
        "launch to first step s": spread(seconds, digits=1),
        "weights of a rank GB": max(rank["held"] for rank in first) / 1e9,
        "read by a rank GB": max(rank["read"] for rank in first) / 1e9,
        "read over owned": max(rank["read"] / rank["owned"] for rank in first),
        "read by all GB": sum(rank["read"] for rank in first) / 1e9,
        "anonymous, rank 0 GB": median(ranks[0]["anonymous"] for ranks in launches) / 1e9,
    }
    print(row, flush=True)
    return row


def draw(figure: Any, *, rows: list[Row]) -> None:
    axes = figure.subplots()
    for limit, marker in (("no", "o"), ("yes", "s")):
        own = [row for row in rows if row["limit"] == limit]
        numbers = [row["ranks"] for row in own]
        label = "prefix in the stages" if limit == "yes" else "prefix on every rank"
        axes.plot(numbers, [row["anonymous, rank 0 GB"] for row in own], marker=marker, label=f"{label}: memory")
        axes.plot(numbers, [row["read by a rank GB"] for row in own], "--", marker=marker, label=f"{label}: read")
    axes.set(xlabel="ranks", ylabel="GB of a rank", xticks=RANKS, ylim=(0, None))
    axes.legend()


if __name__ == "__main__":
    sys.exit(run_guarded(main))
