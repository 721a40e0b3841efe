"""The costs of the trainer where nothing is elastic: one rank, no freezing, against a bare torch loop.

    pipetransformer bench overhead [--repeats 7] [--steps 30] [--model vit|bert]

Both train the same model on the same batches in one process and take turns, a step each, so that a slow moment of the
machine meets both; several processes, because where each happens to lie in memory makes about 1 %. The bare loop is
what one would write by hand: the library's model, torch's fused AdamW, clipping and learning-rate schedule, batches
indexed in line. Memory is the largest resident size of processes that train in one way alone; the trainer's contains
what its measurements before training leave behind.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from time import perf_counter
from typing import Any

import psutil
import torch
import torch.nn.functional as F

from benchmarks.support.command_line import bench_parser
from benchmarks.support.measure import CONFIGS, save, spread
from benchmarks.support.ranks import import_path
from pipetransformer.config import Config, load_config
from pipetransformer.data import alone, epoch_batches
from pipetransformer.launch.arguments import count
from pipetransformer.launch.entry import run_guarded
from pipetransformer.process.device import peak_memory_bytes, reset_peak_memory, synchronize
from pipetransformer.process.world import World, close_world, init_world
from pipetransformer.run.job import build_job
from pipetransformer.trainer import Trainer

COMMON = (
    *("log.wandb=disabled", "checkpoint.every=null", "train.eval_every=1000 epochs"),
    *("pipe.initial_length=1", "pipe.microbatches=1"),
    "model.head_row_only=false",  # the bare loop computes all rows of the last block
)
MODELS = {
    # 32 x 32 pictures in patches of 4: 65 tokens, 5.4 M parameters
    "vit": (
        *("train_config_digits_no_freeze.yaml", "data.image_size=32", "train.batch_size=64"),
        "model.kwargs={patch_size: 4}",
    ),
    # at most 24 tokens, 14 M parameters
    "bert": (
        *("train_config_demo_text.yaml", "freeze.policy=none", "train.batch_size=32"),
        "model.kwargs={hidden_size: 384, intermediate_size: 1536, num_hidden_layers: 8, num_attention_heads: 6}",
    ),
}
WARMUP = 10


def main() -> None:
    parser = bench_parser("overhead", description=__doc__)
    parser.add_argument("--repeats", type=count, default=7, help="processes that are measured, of each model")
    parser.add_argument("--steps", type=count, default=30, help="pairs of steps in each")
    parser.add_argument("--model", choices=MODELS, help="one model alone")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        print(json.dumps(PARTS[arguments.part](arguments.model, arguments.steps)))
        return
    rows = []
    for model in [arguments.model] if arguments.model else MODELS:
        both = [in_its_own_process(model, "pairs", steps=arguments.steps) for _ in range(arguments.repeats)]
        ratios = [sum(bare) / sum(ours) for bare, ours in both]
        memory = [
            [in_its_own_process(model, part, steps=30) for part in ("memory of bare", "memory of trainer")]
            for _ in range(3)
        ]
        peaks = [ours["peak"] / bare["peak"] for bare, ours in memory]
        grown = [(ours["peak"] - ours["before"]) / (bare["peak"] - bare["before"]) for bare, ours in memory]
        bare_ms = [1e3 * seconds for bare, _ in both for seconds in bare]
        rows.append(
            {
                "model": model,
                "throughput over the bare loop's": ratios,
                "steps in ms: bare, trainer": [[[1e3 * s for s in part] for part in pair] for pair in both],
                "peak memory over the bare loop's": peaks,
                "memory taken since the imports over the bare loop's": grown,
                "memory in bytes: bare, trainer": memory,
            }
        )
        print(f"{model}: {arguments.repeats} processes of {arguments.steps} pairs of steps, {spread(bare_ms)} ms each")
        print(f"  throughput over the bare loop's              {spread(ratios)}")
        print(f"  peak memory over the bare loop's             {spread(peaks)} of {memory[0][0]['peak'] / 1e6:.0f} MB")
        print(f"  memory since the imports over the bare's     {spread(grown)}", flush=True)
    print(f"saved {save('overhead', rows)}")


def configuration(model: str, *, steps: int, folder: str) -> Config:
    """At least ``steps`` steps; the learning rate of both loops is that of the whole job."""
    file, *overrides = MODELS[model]
    config = load_config(CONFIGS / file, [*COMMON, *overrides, f"run.dir={folder}", "run.id=overhead"])
    num_samples = 1437 if model == "vit" else 4000
    epochs = math.ceil((steps + 1) / (num_samples // config.train.batch_size))
    return config.with_overrides({"train.epochs": epochs})


def pairs(model: str, *, steps: int) -> tuple[list[float], list[float]]:
    """Seconds of each step of the bare loop and of the trainer's step beside it."""
    bare_s: list[float] = []
    trainer_s: list[float] = []
    world = init_world(timeout_seconds=60)
    with tempfile.TemporaryDirectory() as folder:
        config = configuration(model, steps=steps + WARMUP, folder=folder)
        step_of_bare = bare_loop(config, world)
        began = 0.0

        def take_turns(step: int, gradients: Mapping[str, torch.Tensor]) -> None:
            """Within every step of the trainer; its time is from the end of one call to the next one."""
            nonlocal began
            if not trainer.report.folder.path.exists():
                return  # calibration
            synchronize(world.device)
            now = perf_counter()
            trainer_s.append(now - began)
            step_of_bare(step)
            synchronize(world.device)
            bare_s.append(perf_counter() - now)
            if len(bare_s) == steps + WARMUP:
                raise StopIteration
            began = perf_counter()

        trainer = Trainer(config, world, probe=take_turns)
        with suppress(StopIteration):
            trainer.run()
    close_world()
    return bare_s[WARMUP:], trainer_s[WARMUP:]


def bare_loop(config: Config, world: World) -> Callable[[int], None]:
    """Trains step ``step`` with torch alone."""
    job, train = build_job(config, world, lead=alone), config.train
    model, data = job.whole_model(), job.datasets["train"]
    batches = [
        (epoch, batch)
        for epoch in range(train.epochs)
        for batch in epoch_batches(data.lengths, batch_size=train.batch_size, seed=train.seed, epoch=epoch)
    ]
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": train.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=train.lr, betas=train.betas, eps=train.eps, fused=True)
    warmup = train.warmup_ratio * len(batches)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / max(1.0, warmup), 0.5 * (1 + math.cos(math.pi * step / len(batches)))),
    )
    model.train()

    def step_of_bare(step: int) -> None:
        epoch, batch = batches[step]
        inputs = data.inputs(batch.ids, length=batch.length, epoch=epoch)
        inputs = {name: value.to(world.device, non_blocking=True) for name, value in inputs.items()}
        labels = data.labels[torch.from_numpy(batch.ids)].to(world.device, non_blocking=True)
        optimizer.zero_grad()  # no gradients of the step before beside the activations, as in the trainer
        pictures = inputs.get("pixel_values")
        outputs = model(pictures) if pictures is not None else model(**inputs).logits
        loss = F.cross_entropy(outputs, labels, label_smoothing=train.label_smoothing)
        loss.backward()
        if train.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), train.max_grad_norm)
        optimizer.step()
        schedule.step()

    return step_of_bare


def memory(model: str, *, of: str, steps: int) -> dict[str, int]:
    """Resident bytes of this process before it builds anything, and at most in ``steps`` steps of one of the loops."""
    world = init_world(timeout_seconds=60)
    before = psutil.Process().memory_info().rss
    with tempfile.TemporaryDirectory() as folder:
        config = configuration(model, steps=steps, folder=folder)
        if of == "trainer":
            Trainer(config, world).run()
        else:
            step_of_bare = bare_loop(config, world)
            reset_peak_memory(world.device)  # as the trainer does
            for step in range(steps):
                step_of_bare(step)
    return {"before": before, "peak": peak_memory_bytes(world.device)}


def in_its_own_process(model: str, part: str, *, steps: int) -> Any:
    """The result of a part of this script; its messages go to stderr."""
    command = [sys.executable, __file__, "--part", part, "--model", model, "--steps", str(steps)]
    environment = {**os.environ, **import_path()}
    if part.startswith("memory"):  # else the C library keeps what is freed, more or less of it from run to run
        environment["MALLOC_MMAP_THRESHOLD_"] = "32768"
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
    if ended.returncode:
        sys.exit(f"{part} of {model} failed")
    return json.loads(ended.stdout.splitlines()[-1])


PARTS: dict[str, Callable[[str, int], object]] = {
    "pairs": lambda model, steps: pairs(model, steps=steps),
    "memory of bare": lambda model, steps: memory(model, of="bare", steps=steps),
    "memory of trainer": lambda model, steps: memory(model, of="trainer", steps=steps),
}


if __name__ == "__main__":
    sys.exit(run_guarded(main))
