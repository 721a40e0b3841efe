"""What is left to lose where all is frozen and cached: steps, reads, writes, the advance pass, each beside its bound.

    pipetransformer bench hot-path [--repeats 7]

One rank, one thread, a ViT and a BERT. Rounds take turns with their bound, and a ratio is of one round:

step     an optimizer step with all blocks frozen and read from the cache, over a bare loop that trains the same head on
         a tensor of the same activations
read     bytes a second of a batch gathered from the store, over a copy of as many bytes
write    bytes a second of a batch written to the store, over a copy of as many bytes
advance  samples a second of the advance pass from the model's inputs, over the same forwards on inputs that lie ready
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.support.command_line import bench_parser
from benchmarks.support.measure import CONFIGS, save, spread
from benchmarks.support.ranks import as_ranks
from pipetransformer.cache import AutoCache
from pipetransformer.cache.advance import advance
from pipetransformer.config import Config, load_config
from pipetransformer.data import epoch_batches
from pipetransformer.engine import Engine
from pipetransformer.launch.arguments import count
from pipetransformer.launch.entry import run_guarded
from pipetransformer.plan import ParallelPlan
from pipetransformer.process.collectives import led_by
from pipetransformer.process.world import World
from pipetransformer.run.job import Job, build_job

COMMON = ("train.batch_size=64", "train.precision=float32", "log.wandb=disabled", "train.max_grad_norm=1.0")
MODELS: Mapping[str, tuple[Path, tuple[str, ...]]] = {
    "ViT": (
        CONFIGS / "train_config_digits_no_freeze.yaml",
        ("model.kwargs={patch_size: 4, embed_dim: 192, depth: 6, num_heads: 3}", "data.image_size=32"),
    ),
    "BERT": (
        CONFIGS / "train_config_demo_text.yaml",
        (
            "model.kwargs={hidden_size: 192, intermediate_size: 768, num_hidden_layers: 6, num_attention_heads: 4, "
            "max_position_embeddings: 64}",
        ),
    ),
}
STEPS, SAMPLES = 100, 512


def main() -> None:
    parser = bench_parser("hot-path", description=__doc__)
    parser.add_argument("--repeats", type=count, default=7, help="timed rounds (default 7)")
    arguments = parser.parse_args()
    as_ranks(__file__, partial(run, repeats=arguments.repeats), num_ranks=1)


def run(world: World, *, repeats: int) -> None:
    rows: list[dict[str, object]] = []
    for model, (path, own) in MODELS.items():
        bench = Bench(load_config(path, [*COMMON, *own]), world)
        pairs = {"step": bench.steps(), "read": bench.reads(), "write": bench.writes(), "advance": bench.advances()}
        for name, (ours, bound) in pairs.items():
            times: list[tuple[float, float]] = []
            for number in range(repeats + 1):
                timed = [seconds(action) for action in ((ours, bound) if number % 2 else (bound, ours))]
                times.append((timed[0], timed[1]) if number % 2 else (timed[1], timed[0]))
            ratios = [mine / bare if name == "step" else bare / mine for mine, bare in times[1:]]
            print(f"{model}, {name}: {spread(ratios)} of its bound", flush=True)
            rows.append(
                {
                    "model": model,
                    "what": name,
                    "over its bound": ratios,
                    "seconds": [mine for mine, _ in times[1:]],
                    "seconds of the bound": [bare for _, bare in times[1:]],
                }
            )
    if world.rank == 0:
        title = "All frozen and cached: each beside its bound"
        notes = ["step: time over the bound's, least is best; the others: rate over the bound's."]
        print(f"saved {save('hot-path', rows, title=title, notes=notes)}")


def seconds(action: Callable[[], object]) -> float:
    start = perf_counter()
    action()
    return perf_counter() - start


Pair = tuple[Callable[[], object], Callable[[], object]]


class Bench:
    """A job with all blocks frozen and its training data cached."""

    def __init__(self, config: Config, world: World) -> None:
        self.config = config
        self.job: Job = build_job(config, world, lead=partial(led_by, 0))
        chain, data = self.job.chain, self.job.datasets["train"]
        self.alone = copy.deepcopy(chain)  # that no plan takes apart
        self.cache = AutoCache(config, chain=chain, datasets=self.job.datasets, world=world)
        self.engine = Engine(chain, self.job.datasets, config, world, stores=self.cache.store)
        blocks = chain.num_blocks
        self.plan = ParallelPlan(blocks, 1, 1, (), 1, "1f1b", blocks, blocks)
        self.engine.enter(self.plan)
        assert not self.cache.reserve(), self.cache.declined
        self.cache.advance(blocks)
        store = self.cache.store("train")
        assert store is not None
        self.store, self.chain, self.data = store, chain, data
        plans = epoch_batches(data.lengths, batch_size=config.train.batch_size, seed=0, epoch=0)
        self.batches = ([batch for batch in plans if len(batch.ids) == config.train.batch_size] * STEPS)[:STEPS]

    def steps(self) -> Pair:
        chain, train = self.chain, self.config.train
        stored = chain.boundary(self.plan.first_computed - 1, rows=1, length=1)
        everyone = np.arange(len(self.data))
        kept = self.store.read(everyone, positions=stored.shape[1]).to(chain.dtype)
        head = range(chain.num_units - 1, chain.num_units)
        parameters = list(self.alone.named_parameters(head).values())
        optimizer = torch.optim.AdamW(parameters, lr=0.0, fused=True)
        number = 0

        def ours() -> None:
            nonlocal number
            chain.train()
            for batch in self.engine.feed("train").batches(self.batches, epoch=0):
                self.engine.step(batch, step=number, lr=0.0)
                number += 1

        def bare() -> None:
            for batch in self.batches:
                ids = torch.from_numpy(batch.ids)
                optimizer.zero_grad()
                outputs = self.alone.run(head, kept[ids], {})
                F.cross_entropy(outputs, self.data.labels[ids], label_smoothing=train.label_smoothing).backward()  # type: ignore[no-untyped-call]
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
                optimizer.step()

        return ours, bare

    def _batches_of_store(self) -> list[np.ndarray]:
        ids = np.random.default_rng(0).permutation(len(self.data))[:SAMPLES]
        return list(np.array_split(ids, max(1, len(ids) // self.config.train.batch_size)))

    def reads(self) -> Pair:
        self._fill_half()
        length = int(self.data.lengths.max())
        positions = self.store.layout.positions or length
        parts = self._batches_of_store()
        shape = (max(map(len, parts)), positions, self.store.layout.width)
        out, other = torch.empty(shape), torch.zeros(shape)
        copied = [(out[: len(part)], other[: len(part)]) for part in parts]
        return (
            lambda: [self.store.read(p, positions=positions, out=to) for p, (to, _) in zip(parts, copied)],
            lambda: [to.copy_(source) for to, source in copied],
        )

    def writes(self) -> Pair:
        boundary = self._fill_half()
        positions = self.store.layout.positions or int(self.data.lengths.max())
        parts = self._batches_of_store()
        given = [self.store.read(part, positions=positions) for part in parts]
        tokens = [self.store.layout.num_tokens[part].sum() for part in parts]
        target = [torch.empty(int(n), self.store.layout.width) for n in tokens]
        real = [torch.zeros_like(to) for to in target]
        return (
            lambda: [self.store.write(part, hidden, boundary=boundary) for part, hidden in zip(parts, given)],
            lambda: [to.copy_(source) for to, source in zip(target, real)],
        )

    def _fill_half(self) -> int:
        """A boundary where every row of a sample is stored."""
        boundary = self.chain.num_blocks // 2
        if self.cache.boundary != boundary:
            self.cache.follow(boundary)
            self.engine.enter(replace(self.plan, frozen=boundary, cached=None))
            self.cache.advance(boundary)
        return boundary

    def advances(self) -> Pair:
        chain, boundary = self.chain, self._fill_half()
        rows = self.config.train.batch_size
        plans = epoch_batches(self.data.lengths, batch_size=rows, seed=0, epoch=0, shuffle=False)
        units = range(chain.numbering.behind(boundary))
        ready: list[tuple[Tensor, dict[str, Tensor]]] = []
        for batch in plans:
            raw = self.data.inputs(np.resize(batch.ids, rows), length=batch.length, epoch=0)
            ready.append((raw[chain.family.main_input], {key: raw[key] for key in chain.input_keys}))

        def forwards() -> None:
            chain.train(False)
            with torch.inference_mode():
                for main, side in ready:
                    chain.run(units, main, side)

        def pass_of_all() -> None:
            self.store.clear()
            advance(
                self.store, self.data, chain, source=None, target=boundary, worker=0, num_workers=1, rows=rows
            )  # fmt: skip

        return pass_of_all, forwards


if __name__ == "__main__":
    sys.exit(run_guarded(main))
