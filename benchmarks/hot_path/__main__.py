"""What is left to lose where all is frozen and cached: steps, reads, writes, the advance pass, each beside its bound.

    pipetransformer bench hot-path [--repeats 7]

One rank, one thread, a ViT and a BERT of six blocks with the widths of ViT-Tiny and MiniLM. Rounds take turns with
their bound, and a ratio is of one round:

step     an optimizer step with all blocks frozen and read from the cache, over a bare loop that trains the same head on
         a tensor of the same activations
read     bytes a second of batches gathered from a store of 256 MB, over copies of as many bytes that lie together
gather   the same by torch.index_select alone, without the store around it
write    bytes a second of batches written to that store in the order of an advance pass, over such copies
advance  samples a second of the advance pass from the model's inputs, over the same forwards on inputs that lie ready
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.support.command_line import add_output, bench_parser
from benchmarks.support.measure import CONFIGS, save, spread
from benchmarks.support.ranks import as_ranks
from pipetransformer.cache import AutoCache
from pipetransformer.cache.advance import advance
from pipetransformer.cache.store import ActivationStore, StoreLayout
from pipetransformer.config import Config, load_config
from pipetransformer.data import Batch, epoch_batches
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
            "model.kwargs={hidden_size: 384, intermediate_size: 1536, num_hidden_layers: 6, num_attention_heads: 12, "
            "max_position_embeddings: 64}",
        ),
    ),
}
STEPS, BATCH, STORE_BYTES = 100, 64, 2**28


def main() -> None:
    parser = bench_parser("hot-path", description=__doc__)
    parser.add_argument("--repeats", type=count, default=7, help="timed rounds (default 7)")
    add_output(parser)
    arguments = parser.parse_args()
    as_ranks(__file__, partial(run, repeats=arguments.repeats, folder=arguments.output), num_ranks=1)


def run(world: World, *, repeats: int, folder: Path) -> None:
    rows: list[dict[str, object]] = []
    for model, (path, own) in MODELS.items():
        bench = Bench(load_config(path, [*COMMON, *own]), world)
        pairs = {
            "step": bench.steps,
            "read": bench.reads,
            "gather": bench.gathers,
            "write": bench.writes,
            "advance": bench.advances,
        }
        for name, pair in pairs.items():
            ours, bound = pair()
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
                    "over its bound": median(ratios),
                    "ratios": ratios,
                    "seconds": [mine for mine, _ in times[1:]],
                    "seconds of the bound": [bare for _, bare in times[1:]],
                }
            )
    if world.rank == 0:
        title = "All frozen and cached: each beside its bound"
        notes = ["step: time over the bound's, least is best; the others: rate over the bound's."]
        print(f"saved {save('hot-path', rows, title=title, notes=notes, folder=folder)}")


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
        own = build_job(config, world, lead=partial(led_by, 0))  # that no plan takes apart
        own.whole_model()
        self.alone = own.chain
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
        kept = torch.empty(len(self.data), stored.shape[1], self.store.layout.width, dtype=chain.dtype)
        for length in np.unique(self.data.lengths):
            ids = np.flatnonzero(self.data.lengths == length)
            kept[torch.from_numpy(ids)] = self.store.read(ids, positions=stored.shape[1]).to(chain.dtype)
        head = range(chain.num_units - 1, chain.num_units)
        parameters = list(self.alone.named_parameters(head).values())
        optimizer = torch.optim.AdamW(parameters, lr=0.0, fused=True)
        number = 0
        self.alone.train()

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

    def reads(self) -> Pair:
        store, batches = large_store(self.store.layout, self.data.lengths)
        outs = {batch.length: torch.empty(BATCH, positions_of(store, batch), store.layout.width) for batch in batches}
        copies = copies_of(store, batches)
        return (
            lambda: [
                store.read(batch.ids, positions=positions_of(store, batch), out=outs[batch.length]) for batch in batches
            ],
            lambda: [to.copy_(source) for source, to in copies],
        )

    def gathers(self) -> Pair:
        """All slots lie in one tensor here, whatever their lengths, so that slots of one length stand for the rest."""
        layout = self.store.layout
        positions = int(np.median(layout.positions))
        slots = torch.zeros(STORE_BYTES // (positions * layout.position_bytes), positions, layout.width)
        out = torch.empty(BATCH, positions, layout.width)
        orders = torch.randperm(len(slots)).split(BATCH)[:-1]
        source = slots.split(BATCH)
        return (
            lambda: [torch.index_select(slots, 0, order, out=out) for order in orders],
            lambda: [out.copy_(part) for part, _ in zip(source, orders)],
        )

    def writes(self) -> Pair:
        store, batches = large_store(self.store.layout, self.data.lengths, shuffle=False)
        given = {batch.length: store.read(batch.ids, positions=positions_of(store, batch)).clone() for batch in batches}
        copies = copies_of(store, batches)
        return (
            lambda: [store.write(batch.ids, given[batch.length], boundary=1) for batch in batches],
            lambda: [source.copy_(to) for source, to in copies],
        )

    def _fill_half(self) -> int:
        """A boundary that the cache holds now, half-way."""
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


def large_store(like: StoreLayout, lengths: np.ndarray, *, shuffle: bool = True) -> tuple[ActivationStore, list[Batch]]:
    """A full store whose samples have as many tokens as those of ``like``, again and again; its full batches."""
    times = 1 + STORE_BYTES // like.num_bytes
    store = ActivationStore.reserve(replace(like, positions=np.tile(like.positions, times)))
    batches = epoch_batches(np.tile(lengths, times), batch_size=BATCH, seed=0, epoch=0, shuffle=shuffle)
    full = [batch for batch in batches if len(batch) == BATCH]
    for batch in full:
        ones = torch.ones(BATCH, positions_of(store, batch), store.layout.width)
        store.write(batch.ids, ones, boundary=1)
    return store, full


def positions_of(store: ActivationStore, batch: Batch) -> int:
    return int(store.layout.positions[batch.ids[0]])


def copies_of(store: ActivationStore, batches: Sequence[Batch]) -> list[tuple[Tensor, Tensor]]:
    """For each batch, as many bytes of a tensor as large as the store, and a place for them that is used again."""
    layout = store.layout
    memory = torch.zeros(int(layout.positions.sum()), layout.width)
    rows = [int(layout.positions[batch.ids].sum()) for batch in batches]
    place = torch.zeros(max(rows), layout.width)
    starts = np.cumsum([0, *rows])
    return [(memory[start : start + n], place[:n]) for start, n in zip(starts, rows)]


if __name__ == "__main__":
    sys.exit(run_guarded(main))
