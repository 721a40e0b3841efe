"""What a pipeline saves: weights, gradients and moments, beside plain data parallelism with as many micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.ddp_vs_pipe.fresh_ranks import FreshRanks
from benchmarks.ddp_vs_pipe.scales import CONFIG, Scale, kind_of_device
from benchmarks.ddp_vs_pipe.trials import State, Trial, hold_state
from benchmarks.support.table import Row, write_table
from pipetransformer.config import load_config
from pipetransformer.plan import ParallelPlan

__all__ = ["tell_state"]

RANKS, BATCH, CHUNKS = 4, 16, 4
BUCKET_MB = 25  # torch's default
STATE_BYTES = 16  # of a parameter in float32: weight, gradient, AdamW's two moments


@dataclass(frozen=True, slots=True)
class Held:
    """A method, its plan, and what every rank [ranks] holds under it."""

    name: str
    plan: ParallelPlan
    states: tuple[State, ...]


def tell_state(ranks: FreshRanks, scale: Scale, *, scale_name: str, folder: Path) -> None:
    config = load_config(CONFIG, (*scale.state_job, "train.optimizer=adamw"))
    found = []
    for name, pp, m, bucket_mb in (
        ("DDP (torch)", 1, 1, BUCKET_MB),
        ("DDP (torch), no_sync", 1, CHUNKS, BUCKET_MB),
        ("our plan", 1, 1, None),
        ("our plan", 1, CHUNKS, None),
        ("our plan", 2, CHUNKS, None),
        ("our plan", RANKS, CHUNKS, None),
    ):
        plan = even_plan(pp, num_microbatches=m, num_blocks=scale.state_blocks)
        trial = Trial(config, plan, bucket_mb, batch=BATCH, steps=1)
        found.append(Held(name, plan, tuple(ranks.run(hold_state, trial, num_ranks=RANKS))))
        print(f"{name}, pp {pp}, M {m}: {max(s.peak_bytes for s in found[-1].states) / 1e6:,.0f} MB", flush=True)
    write_table(
        "ddp-vs-pipe-state",
        [row_of(held) for held in found],
        title=f"What a pipeline saves: AdamW, batch {BATCH} on {RANKS} ranks ({scale_name}, {kind_of_device()})",
        notes=[
            f"state MB: {STATE_BYTES} bytes (weight, gradient, two moments in float32) for every parameter of the rank "
            "that trains most; MB a rank: the peak of the fullest rank over what it held without the model, and "
            "the emptiest rank's.",
            "summed MB: gradients that the fullest rank gave to the sum over replicas in a step, counted as they were "
            "sent; torch's DDP does not tell.",
            "Pipelines are cut before even blocks, 1F1B, nothing recomputed; a small batch has few activations.",
        ],
        draw=partial(_draw, found),
        folder=folder,
    )


def even_plan(pp: int, *, num_microbatches: int, num_blocks: int) -> ParallelPlan:
    """As many blocks on every rank; the stem goes with the first, the head with the last."""
    cuts = tuple(1 + num_blocks * stage // pp for stage in range(1, pp))
    return ParallelPlan(0, pp, RANKS // pp, cuts, num_microbatches, "1f1b", None, num_blocks)


def row_of(held: Held) -> Row:
    most = max(held.states, key=lambda state: state.num_parameters)
    peaks = [state.peak_bytes for state in held.states]
    return {
        "method": held.name,
        "pp": held.plan.pp,
        "dp": held.plan.dp,
        "M": held.plan.num_microbatches,
        "global batch": BATCH,
        "parameters": most.num_parameters,
        "state MB": STATE_BYTES * most.num_parameters / 1e6,
        "MB a rank": max(peaks) / 1e6,
        "emptiest": min(peaks) / 1e6,
        "summed MB": None if most.sent_bytes is None else most.sent_bytes / 1e6,
    }


def _draw(found: Sequence[Held], figure: Figure) -> None:
    rows = [row_of(held) for held in found]
    names = [f"{row['method']}\npp {row['pp']}, M {row['M']}" for row in rows]
    axes = figure.subplots()
    for column, width in (("MB a rank", 0.8), ("state MB", 0.5)):
        axes.bar(names, [row[column] for row in rows], width=width, label=column)
    axes.set_ylabel("MB")
    axes.tick_params(axis="x", rotation=20)
    axes.legend()
