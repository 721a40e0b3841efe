"""One GPU, ten minutes, nobody beside it: a ViT-B/16 and a BERT-large, what freezing and the cache bring there.

    python benchmarks/gpu/run.py [--output FOLDER]        (or: pipetransformer bench gpu)

Data and configurations are made on the spot; no network. On a machine without a GPU the same at toy size, to see that
it runs. Writes ``FOLDER/gpu.json``:

- a step with nothing frozen beside the library's own model in a bare loop (bfloat16 autocast, fused AdamW), compiled
  and not;
- steps with n = 0, 1/4, 1/2, 3/4 and all of the blocks frozen, the prefix computed and read from the cache in the
  host's memory (there is no other yet), in blocks that are compiled, each beside steps with n = 0 of the same round;
- the advance pass beside the same forwards on inputs that lie ready, a transition, peak memory beside its prediction;
- checks (``checks.py``).

Goals stand in the rows: 1.0 of the library's step, 8 times the step of n = 0 with all frozen and cached, 0.95 of the
forwards alone. What there is no time left for is left out, and said.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu.checks import (
    Check,
    a_raising_rank_ends_the_job,
    boundaries_have_their_type,
    memory_is_released,
    same_bits,
)
from benchmarks.gpu.data import write_questions, write_reader
from benchmarks.support.command_line import add_output, bench_parser
from benchmarks.support.measure import CONFIGS, save, spread
from pipetransformer.cache import AutoCache
from pipetransformer.config import Config, load_config
from pipetransformer.config.calendar import Calendar
from pipetransformer.data import alone
from pipetransformer.engine import Engine
from pipetransformer.launch.entry import run_guarded
from pipetransformer.pipe.controller import AutoPipe
from pipetransformer.pipe.planner.search import predict
from pipetransformer.plan import ParallelPlan
from pipetransformer.process.device import device_name, synchronize
from pipetransformer.process.world import World, close_world, init_world
from pipetransformer.run.job import Job, build_job

STEPS, ROUNDS = (10, 5) if torch.cuda.is_available() else (2, 2)
ALL_SECONDS, CHECKS_SECONDS = 600, 120  # of the whole script, of its last part
BEGAN = perf_counter()
torch._dynamo.config.recompile_limit = 64  # a block is compiled anew with gradients and without


@dataclass(frozen=True, slots=True)
class Size:
    """What is trained where there is a GPU, or where there is none."""

    vit: tuple[str, ...]
    bert: dict[str, int]
    words: int
    tokens: int
    batches: tuple[int, int]


FULL = Size(
    vit=("model.name=vit_base_patch16_224", "model.kwargs={}", "data.image_size=224"),
    bert=dict(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16,
        max_position_embeddings=512,
    ),
    words=379,  # with the question, no token is padding
    tokens=384,
    batches=(64, 16),
)  # fmt: skip
TOY = Size(
    vit=("model.kwargs={patch_size: 4, embed_dim: 32, depth: 4, num_heads: 2}", "data.image_size=16"),
    bert=dict(
        hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2, max_position_embeddings=64
    ),
    words=24,
    tokens=48,
    batches=(8, 4),
)


def main() -> None:
    parser = bench_parser("gpu", description=__doc__)
    add_output(parser)
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    size = FULL if on_gpu else TOY
    world = init_world(timeout_seconds=300)
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, config in configurations(size, Path(folder), on_gpu=on_gpu):
            rows += Bench(name, config, world).rows()
    close_world()
    ends = a_raising_rank_ends_the_job(torch.cuda.device_count() if on_gpu else 2)
    rows.append(row_of(ends, model="-"))
    print(f"{ends.name}: {ends.passed} ({ends.evidence})", flush=True)
    scale = "full" if on_gpu else "toy"
    title = f"One device, {device_name(torch.device('cuda' if on_gpu else 'cpu'))}, {scale} size"
    print(f"saved {save('gpu' if on_gpu else 'gpu-toy', rows, title=title, folder=arguments.output)}")


def configurations(size: Size, folder: Path, *, on_gpu: bool) -> list[tuple[str, Config]]:
    common = (
        *("train.precision=bfloat16", "train.max_grad_norm=1.0", "log.wandb=disabled", "checkpoint.every=null"),
        *("model.dropout=0.0", "freeze.policy=none", "train.seed=0"),
    )
    vit = (*common, *size.vit, f"train.batch_size={size.batches[0]}", "data.max_train_samples=640")
    reader = write_reader(folder / "bert", **size.bert)
    questions = write_questions(folder / "questions", num_train=64, num_words=size.words)
    bert = (
        *(*common, f"model.name={reader}", "model.pretrained=false", f"data.path={questions}"),
        *(f"data.max_length={size.tokens}", "data.stride=8", f"train.batch_size={size.batches[1]}"),
    )
    return [
        ("ViT", load_config(CONFIGS / "train_config_digits_no_freeze.yaml", vit)),
        ("BERT", load_config(CONFIGS / "train_config_squad_no_freeze.yaml", bert)),
    ]


class Bench:
    """One model on this device."""

    def __init__(self, name: str, config: Config, world: World) -> None:
        self.name, self.config, self.world = name, config, world
        self.job: Job = build_job(config, world, lead=alone)
        self.chain, self.data = self.job.chain, self.job.datasets["train"]
        self.cache = AutoCache(config, chain=self.chain, datasets=self.job.datasets, world=world)
        self.engine = Engine(self.chain, self.job.datasets, config, world, stores=self.cache.store)
        self.batches = self.job.train_batches(0)
        self.batch = max(self.batches, key=len)
        self.step_number = 0
        self.compiler = "inductor" if world.device.type == "cuda" else "eager"  # which needs no other compiler

    def rows(self) -> list[dict[str, object]]:
        rows = [*self.beside_the_library(), *self.frozen()]
        for row in rows:
            goal = "" if row["goal"] is None else f" (goal {row['goal']})"
            print(f"{self.name}, {row['what']}: {row['told']}{goal}", flush=True)
        checks = [*self.checks()]
        for check in checks:
            print(f"{self.name}, {check.name}: {check.passed} ({check.evidence})", flush=True)
        self.engine.close()
        self.cache.close()
        return [*rows, *(row_of(check, model=self.name) for check in checks)]

    # ---- steps -----------------------------------------------------------------------------------------------------

    def plan(self, frozen: int, *, cached: int | None = None) -> ParallelPlan:
        return ParallelPlan(frozen, 1, 1, (), 1, "1f1b", cached, self.chain.num_blocks)

    def step_seconds(self) -> float:
        """Mean seconds of steps in a row, read ahead as in training."""
        inputs = self.engine.feed("train").batches([self.batch] * (STEPS + 2), epoch=0)
        self.chain.train()
        for number in range(STEPS + 2):
            if number == 2:
                synchronize(self.chain.device)
                start = perf_counter()
            self.engine.step(next(inputs), step=self.step_number, lr=0.0)
            self.step_number += 1
        synchronize(self.chain.device)
        seconds = (perf_counter() - start) / STEPS
        inputs.close()
        return seconds

    def beside_the_library(self) -> list[dict[str, object]]:
        rows = []
        self.engine.enter(self.plan(0))
        for compiles in (False, True):
            bare = self.bare_loop(compiles=compiles)
            if compiles:
                for block in self.chain.blocks:
                    block.compile(backend=self.compiler)
            pairs = []
            for _ in range(ROUNDS):
                pairs.append((self.step_seconds(), bare()))
            ratios = [theirs / mine for mine, theirs in pairs]
            how = "compiled" if compiles else "not compiled"
            rows.append(self.row(f"no freeze, {how}: speed over the library's", ratios, goal=1.0))
        return rows

    def bare_loop(self, *, compiles: bool) -> Callable[[], float]:
        """Mean seconds of a step of the library's own model, whose weights are ours: their learning rate is 0."""
        network: nn.Module = self.job.built.model
        run = torch.compile(network, backend=self.compiler) if compiles else network
        optimizer = torch.optim.AdamW(network.parameters(), lr=0.0, fused=True)
        raw = self.data.inputs(self.batch.ids, length=self.batch.length, epoch=0)
        labels = self.data.labels[torch.from_numpy(self.batch.ids)].to(self.chain.device)

        def loss_of(inputs: dict[str, Tensor]) -> Tensor:
            if "pixel_values" in inputs:
                return F.cross_entropy(run(inputs["pixel_values"]).float(), labels)
            told = run(**inputs)
            spans = (told.start_logits.float(), told.end_logits.float())
            return sum(F.cross_entropy(logits, side) for logits, side in zip(spans, labels.T)) / 2  # type: ignore[return-value]

        def steps() -> float:
            self.engine.layout.reducer.begin(num_microbatches=1)
            for number in range(STEPS + 2):
                if number == 2:
                    synchronize(self.chain.device)
                    start = perf_counter()
                pinned = {k: v.pin_memory() if self.chain.device.type == "cuda" else v for k, v in raw.items()}
                inputs = {key: value.to(self.chain.device, non_blocking=True) for key, value in pinned.items()}
                optimizer.zero_grad()
                with self.chain.autocast():
                    loss = loss_of(inputs)
                torch.autograd.backward(loss)
                nn.utils.clip_grad_norm_(network.parameters(), 1.0)
                optimizer.step()
            synchronize(self.chain.device)
            return (perf_counter() - start) / STEPS

        return steps

    def frozen(self) -> list[dict[str, object]]:
        rows, length = [], self.chain.num_blocks
        self.engine.enter(self.plan(0))
        costs = self.costs()
        for frozen in dict.fromkeys(round(length * share) for share in (0, 0.25, 0.5, 0.75, 1)):
            for cached in (None, frozen) if frozen else (None,):
                if perf_counter() - BEGAN > ALL_SECONDS - CHECKS_SECONDS:
                    rows.append({**self.row(f"n {frozen}", []), "told": "left out: no time was left"})
                    continue
                plan = self.plan(frozen, cached=cached)
                move = self.engine.enter(replace(plan, cached=None))
                if cached is None:
                    rows.append(self.row(f"n {frozen}: transition s", [move.seconds]))
                if cached is not None:
                    assert not self.cache.reserve(), self.cache.declined
                    start = perf_counter()
                    advance = self.cache.advance(cached)
                    synchronize(self.chain.device)
                    rate = advance.num_samples / (perf_counter() - start)
                    rows.append(self.row(f"n {frozen}: advance samples/s", [rate]))
                    share = rate * self.forward_seconds(frozen) / len(self.batch.ids)
                    rows.append(self.row(f"n {frozen}: advance over its forwards alone", [share], goal=0.95))
                kind = "read from the host" if cached is not None else "computed"
                ratios = []
                for _ in range(ROUNDS):
                    self.engine.enter(self.plan(0))
                    base = self.step_seconds()
                    self.engine.enter(plan)
                    if self.chain.device.type == "cuda":
                        torch.cuda.reset_peak_memory_stats()
                    ratios.append(base / self.step_seconds())
                goal = 8.0 if cached == length else None
                rows.append(self.row(f"n {frozen}, prefix {kind}: speed over n 0", ratios, goal=goal))
                if self.chain.device.type == "cuda":
                    expected = predict(plan, costs=costs, global_batch_size=self.config.train.batch_size).memory_bytes[
                        0
                    ]
                    real = torch.cuda.max_memory_allocated()
                    rows.append(self.row(f"n {frozen}, prefix {kind}: predicted over real memory", [expected / real]))
        return rows

    def forward_seconds(self, frozen: int) -> float:
        """Of a batch of this job's rows through the prefix, its inputs on the device; the mean of some in a row."""
        chain = self.chain
        raw = self.data.inputs(self.batch.ids, length=self.batch.length, epoch=0)
        inputs = {key: value.to(chain.device) for key, value in raw.items()}
        main, side = inputs[chain.family.main_input], {key: inputs[key] for key in chain.input_keys}
        chain.train(False)
        with torch.inference_mode():
            for number in range(STEPS + 2):
                if number == 2:
                    synchronize(chain.device)
                    start = perf_counter()
                chain.run(range(chain.numbering.behind(frozen)), main, side)
            synchronize(chain.device)
        return (perf_counter() - start) / STEPS

    def costs(self):  # type: ignore[no-untyped-def]
        calendar = Calendar.of(self.config, batches_per_epoch=len(self.batches))
        autopipe = AutoPipe(self.config, chain=self.chain, world=self.world, calendar=calendar)
        self.engine.forget()
        autopipe.measure(self.engine, self.batches)
        return autopipe.profile.job

    # ---- checks ----------------------------------------------------------------------------------------------------

    def checks(self) -> list[Check]:
        self.cache.follow(0)
        self.engine.enter(self.plan(0))
        raw = self.data.inputs(self.batch.ids[:2], length=self.batch.length, epoch=0)
        inputs = {key: value.to(self.chain.device) for key, value in raw.items()}
        return [
            boundaries_have_their_type(self.engine, inputs),
            memory_is_released(self.engine, self.plan(0), self.plan(self.chain.num_blocks // 2), self.one_step),
            same_bits(self.trained),
        ]

    def one_step(self) -> None:
        inputs = self.engine.feed("train").batches([self.batch], epoch=0)
        self.chain.train()
        self.engine.step(next(inputs), step=0, lr=0.0)
        inputs.close()

    def trained(self) -> tuple[list[Tensor], list[Tensor]]:
        """Weights before and after some steps; they are set back."""
        self.engine.enter(self.plan(0))
        self.engine.forget_steps()
        kept = {name: value.detach().clone() for name, value in self.chain.model.named_parameters()}
        self.chain.train()
        inputs = self.engine.feed("train").batches([self.batch] * 3, epoch=0)
        for step, batch in enumerate(inputs):
            self.engine.step(batch, step=step, lr=1e-4)
        found = [value.detach().clone() for value in self.chain.model.parameters()]
        with torch.no_grad():
            for name, value in self.chain.model.named_parameters():
                value.copy_(kept[name])
        return list(kept.values()), found

    def row(self, what: str, values: list[float], *, goal: float | None = None) -> dict[str, object]:
        told = spread(values) if values else ""
        return {"model": self.name, "what": what, "told": told, "goal": goal, "values": values}


def row_of(check: Check, *, model: str) -> dict[str, object]:
    told = {True: "yes", False: "NO", None: "not on this machine"}[check.passed]
    return {"model": model, "what": check.name, "told": f"{told}: {check.evidence}", "goal": None, "values": []}


if __name__ == "__main__":
    sys.exit(run_guarded(main))
