"""The tasks of the table, and its rows: a row is a name and the settings that make it, a task all that rows share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.contest import KEEPS, MALLOC
from benchmarks.support.measure import CONFIGS
from pipetransformer.errors import UserError

__all__ = [
    *("BASELINE", "BY_SEED", "DEFAULT", "DEFAULT_TUNED", "NUM_HELD_OUT", "NUM_PHRASES", "OTHER_LAYOUT", "PEER"),
    *("PLANTED", "REDRAWN", "REPLICAS", "ROWS", "TUNED"),
    *("Row", "Task", "pictures", "questions", "texts", "ladder_rows", "recipe_rows"),
]

BASELINE, TUNED, DEFAULT, PEER = "no freeze", "no freeze, tuned", "default", f"the peer{KEEPS}"
DEFAULT_TUNED = "default, tuned"  # by the recipe that is tuned without freezing
BY_SEED = "{seed}"  # in the place of data that each seed has of its own
NUM_PHRASES, NUM_HELD_OUT = 2000, 4500  # of SST-2: trained on, and full sentences to judge by
NUM_PICTURES = 10000  # of the other half of CIFAR-100's classes
NUM_QUESTIONS = 787  # about 2,000 windows of 128 tokens


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table.

    Attributes:
        name: its name.
        overrides: settings beside those of the task.
        seeds: number of runs, with as many seeds, the first ones of the table.
        script: the module that is run instead of the task's entry.
        variables: (name, value) of the environment that it runs in, beside what is there.
    """

    name: str
    overrides: tuple[str, ...]
    seeds: int
    script: str | None = None
    variables: tuple[tuple[str, str], ...] = ()


_OFF = ("pipe.enabled=false", "dp.enabled=false", "cache.enabled=false")
# Rows of one seed differ by what they freeze alone: of two layouts that are about as fast as each other a timing takes
# either, and they round otherwise. All keep the one without a pipeline; a row times the other one beside it.
REPLICAS, _PIPELINE = "pipe.initial_length=1", "pipe.initial_length=2"
_STATIC = ("freeze.policy=none", "cache.enabled=false")
_NONE, OTHER_LAYOUT = (*_STATIC, REPLICAS), "no freeze, two stages"
_HALF, _UNCACHED, _UNGUARDED = "policy static, half", "default, no cache", "freeze.guard=false"
_SCHEDULE = ("freeze.policy=schedule", _UNGUARDED)
ROWS = (
    Row(BASELINE, _NONE, 8),
    Row(OTHER_LAYOUT, (*_STATIC, _PIPELINE), 3),
    Row(TUNED, _NONE, 3),
    Row(PEER, _NONE, 8, variables=tuple(MALLOC.items())),  # as ours does for itself
    Row(DEFAULT, (REPLICAS,), 8),
    Row(DEFAULT_TUNED, (REPLICAS,), 3),
    Row(_UNCACHED, ("cache.enabled=false", REPLICAS), 3),  # what the cache brings, or costs
    # As published: without the guard. One schedule for all rows of the ablation, which begin with a pipeline.
    Row("schedule, freeze only", (*_SCHEDULE, *_OFF, _PIPELINE), 3),
    Row("schedule, + AutoPipe", (*_SCHEDULE, *_OFF[1:], _PIPELINE), 3),
    Row("schedule, + AutoDP", (*_SCHEDULE, *_OFF[2:], _PIPELINE), 3),
    Row("schedule, + AutoCache", (*_SCHEDULE, _PIPELINE), 3),
    *(
        Row(f"policy {name}", (f"freeze.policy={name}", _UNGUARDED, REPLICAS), 3)
        for name in ("schedule", "paper", "percentile", "plasticity", "top_down")
    ),
    Row(_HALF, ("freeze.policy=static", "freeze.max_frozen=HALF", _UNGUARDED, REPLICAS), 3),
)
# Faults, planted in the settings of the default: what must become of them stands in docs/results.md.
INVERTED, REDRAWN, TOO_DEEP = "planted: guard inverted", "planted: half redrawn", "planted: all but one frozen"
TOO_SOON, TOO_SOON_INVERTED = "planted: schedule", "planted: schedule, guard inverted"
_INVERTED_GUARD = "benchmarks.elastic.inverted_guard"
PLANTED = (
    Row(INVERTED, (REPLICAS,), 3, _INVERTED_GUARD),
    # Half of the blocks after an epoch, and more after two: what the guard is there for.
    Row(TOO_SOON, ("freeze.policy=schedule", REPLICAS), 1),
    Row(TOO_SOON_INVERTED, ("freeze.policy=schedule", REPLICAS), 1, _INVERTED_GUARD),
    Row(REDRAWN, ("model.name=REDRAWN", REPLICAS), 1),
    Row(TOO_DEEP, ("freeze.policy=static", "freeze.max_frozen=ALL_BUT_ONE", REPLICAS), 1),
)


@dataclass(frozen=True, slots=True)
class Task:
    """A model on some data.

    Attributes:
        name: its name.
        config: the configuration file.
        overrides: the recipe, for every row, the peer's too.
        tuned: what is changed for the rows whose recipe is tuned for least time to target without freezing, on other
            seeds and data.
        num_blocks: number of blocks of the model.
        about: the data in a sentence or two, for the reader of the table.
        row_names: the rows that it has.
        origin: what a run depends on beside its settings: digests of what lies where they only name a place.
        start: digest of the weights that a run begins with, where they were made here and depend on the processor.
        metric: the metric of the table.
        margin: how far below the baseline's mean final metric the target lies, in the metric's unit; None: there is no
            target, the metric is told and not judged.
        timm: timm's train.py, where that is the peer; else it is Hugging Face's Trainer.
        redrawn: folder of the model with the leading half of its blocks drawn anew.
    """

    name: str
    config: Path
    overrides: tuple[str, ...]
    tuned: tuple[str, ...]
    num_blocks: int
    about: str
    row_names: tuple[str, ...]
    origin: tuple[str, ...] = ()
    start: str = ""
    metric: str = "accuracy"
    margin: float | None = 0.003
    timm: Path | None = None
    redrawn: Path | None = None

    @property
    def epochs(self) -> int:
        """Number of epochs of the recipe."""
        return _epochs(self.overrides)

    def epochs_of(self, row: Row) -> int:
        """Number of epochs of a row."""
        return _epochs(self.settings(row, seed=0))

    def settings(self, row: Row, *, seed: int) -> tuple[str, ...]:
        """All settings of a cell."""
        numbers = {"HALF": self.num_blocks // 2, "ALL_BUT_ONE": self.num_blocks - 1, "REDRAWN": self.redrawn}
        own = row.overrides
        for word, value in numbers.items():
            own = tuple(each.replace(word, str(value)) for each in own)
        shared = tuple(each.replace(BY_SEED, str(seed)) for each in self.overrides)
        return (*shared, *(self.tuned if row.name in (TUNED, DEFAULT_TUNED) else ()), *own, f"train.seed={seed}")


def _epochs(settings: Sequence[str]) -> int:
    """By the last setting of them, which holds."""
    return int([each for each in settings if each.startswith("train.epochs=")][-1].removeprefix("train.epochs="))


# What an earlier cell has left on disk would be found.
_COMMON = ("log.wandb=disabled", "checkpoint.every=null", "log.every=1000", "cache.disk_budget=null")
_TEXTS = (
    *("train.epochs=3", "train.batch_size=32", "train.warmup_ratio=0.1"),
    *("train.head_lr_scale=10", "data.max_length=128"),
)
_LEARNING_RATE = "5e-5"
_TUNED_TEXTS = ("train.lr=1e-4", "train.epochs=2")  # of both models, by their tables of --tune


# The rows of pictures: their runs take minutes.
_FEW = (BASELINE, OTHER_LAYOUT, TUNED, PEER, DEFAULT, DEFAULT_TUNED, _UNCACHED, _HALF)
# Learning rates and epochs to choose from, and how often their runs are evaluated, by kind of task.
_TUNED: Mapping[str, tuple[tuple[str, ...], tuple[int, ...], str]] = {
    "sst2": (("1e-4", "2e-4", "4e-4"), (1, 2), "45 steps"),
    "cifar100": (("5e-4", "1e-3", "2e-3"), (4, 6), "1 epoch"),
}


# (share of the learning rates' sum that is to come, frozen blocks from there on), by kind of task and number of blocks.
_LADDERS: Mapping[tuple[str, int], tuple[tuple[tuple[float, int], ...], ...]] = {
    ("sst2", 6): (
        ((1.0, 1),),
        ((0.5, 1),),
        ((0.5, 1), (0.05, 2)),
        ((0.05, 2),),
        ((0.05, 5),),
    ),
    ("sst2", 12): (
        ((1.0, 4),),
        ((1.0, 2), (0.05, 10)),
        ((1.0, 4), (0.05, 10)),
        ((0.5, 4), (0.05, 10)),
        ((1.0, 4), (0.5, 6), (0.05, 10)),
        ((1.0, 6), (0.05, 10)),
        ((1.0, 4), (0.5, 6), (0.125, 8), (0.05, 10)),
    ),
    ("cifar100", 12): (((0.1, 10),), ((0.05, 10),), ((0.1, 8),), ((0.3, 2), (0.15, 6), (0.05, 10))),
}


def ladder_rows(kind: str, num_blocks: int) -> tuple[Row, ...]:
    """Numbers of frozen blocks over time at the recipe: the default policy comes from their table."""
    return tuple(map(_ladder, _LADDERS[kind, num_blocks]))


def _ladder(steps: tuple[tuple[float, int], ...]) -> Row:
    told = ", ".join(f"{frozen} at {share:g}" for share, frozen in steps)
    options = f"freeze.options={{steps: {[list(step) for step in steps]}}}"
    policy = ("freeze.policy=benchmarks.elastic.ladder:Ladder", options, "freeze.every=16 steps", _UNGUARDED, REPLICAS)
    return Row(f"frozen {told}", (*policy, "freeze.averaged=true"), 8)


def recipe_rows(kind: str) -> tuple[Row, ...]:
    """Nothing frozen, with other learning rates and epochs: the recipes and what is tuned come from their table."""
    rates, epochs, every = _TUNED[kind]
    return tuple(
        Row(
            f"lr {rate}, epochs {count}",
            (*_NONE, f"train.lr={rate}", f"train.epochs={count}", f"train.eval_every={every}"),
            2,
        )
        for rate in rates
        for count in epochs
    )


def texts(data: Path, model: Path, *, num_blocks: int, num_phrases: int = NUM_PHRASES, tunes: bool = False) -> Task:
    """SST-2 by ``data`` (``support/sst2.py``), with the model in a folder.

    Args:
        num_phrases: phrases to train on.
        tunes: whether the rows are other recipes and numbers of frozen blocks over time.

    Raises:
        UserError: there is no recipe for as many blocks.
    """
    if ("sst2", num_blocks) not in _LADDERS:
        raise UserError(f"--model: {model} has {num_blocks} blocks; give an encoder of 6 or 12")
    row_names = tuple(row.name for row in ROWS)
    trained = f"{num_phrases:,} phrases; judged on"
    about = f"{trained} the dev set and {NUM_HELD_OUT:,} full sentences of which no phrase is trained on."
    name = f"sst2-{model.name}" + (f"-{num_phrases}" if num_phrases != NUM_PHRASES else "")
    every = f"{45 * num_phrases // NUM_PHRASES} steps"  # so often is a good part of a run
    if num_phrases != NUM_PHRASES:
        planted = (INVERTED, TOO_SOON, TOO_SOON_INVERTED) if num_blocks == 6 else (REDRAWN, TOO_DEEP)
        row_names = (BASELINE, PEER, DEFAULT, *planted)
    if tunes:
        name, tuned_rows = f"{name}-tuning", (*recipe_rows("sst2"), *ladder_rows("sst2", num_blocks))
        row_names = (BASELINE, *(row.name for row in tuned_rows))
        every = "3 epochs"
        about = f"{trained} other full sentences, for each seed another half of the same; the other tables judge by "
        about += "none of them."
    places = (f"data.path={data / BY_SEED if tunes else data}", f"model.name={model.resolve()}")
    own = (*places, f"train.lr={_LEARNING_RATE}", f"train.eval_every={every}")
    return Task(
        name,
        CONFIGS / "train_config_sst2_all_in_one.yaml",
        (*_COMMON, *_TEXTS, *own),
        _TUNED_TEXTS,
        num_blocks,
        about,
        row_names,
        origin=(f"{num_phrases} phrases", f"{NUM_HELD_OUT} sentences", "tuned by seed" if tunes else "judged"),
        redrawn=data.parent / "redrawn",
    )


_PICTURES = (
    *("data.image_size=32", f"data.max_train_samples={NUM_PICTURES}", "train.epochs=8", "train.batch_size=64"),
    *("train.optimizer=adamw", "train.lr=5e-4", "train.lr_schedule=cosine", "train.warmup_ratio=0"),
    *("train.weight_decay=0.05", "train.label_smoothing=0"),
    "train.eval_every=1 epoch",  # timm's script can do no other
)


def pictures(
    data: Path,
    model: Path,
    *,
    about: str,
    origin: tuple[str, ...],
    timm: Path | None,
    start: str = "",
    tunes: bool = False,
) -> Task:
    """Half of CIFAR-100's classes by ``data``, with a ViT of 12 blocks that is pre-trained on the others.

    Args:
        about: the pre-training, in a sentence.
        origin: digests of the way to its weights and of the pictures.
        start: digest of its weights.
        timm: timm's train.py; None leaves the peer's row out.
        tunes: whether the rows are other recipes and numbers of frozen blocks over time.
    """
    own: tuple[str, ...] = (f"data.path={data}", f"model.name={model.resolve()}")
    own = (*own, "train.eval_every=8 epochs") if tunes else own
    judges = "2,500 others; none of these is in the other table" if tunes else "all their test pictures"
    trained = f"Then trained on {NUM_PICTURES:,} pictures of the other classes, and judged on {judges}."
    rows = tuple(name for name in _FEW if name != PEER or timm is not None)
    if tunes:
        rows = (BASELINE, *(row.name for row in (*recipe_rows("cifar100"), *ladder_rows("cifar100", 12))))
    peer = (
        ""
        if tunes
        else "No row of the peer: --timm-train FILE gives one."
        if timm is None
        else "The peer leaves out the last, shorter batch of an epoch, its attention is the faster of timm's two "
        "(TIMM_FUSED_ATTN), by a timing before each run, and its wall s begin with the launcher."
    )
    return Task(
        "cifar100-split-tuning" if tunes else "cifar100-split",
        CONFIGS / "train_config_cifar100_all_in_one.yaml",
        (*_COMMON, *_PICTURES, *own),
        ("train.lr=1e-3", "train.epochs=6"),
        12,
        f"{about} {trained} {peer}".strip(),
        rows,
        origin=origin,
        start=start,
        timm=timm,
    )


_QUESTIONS = (
    *("data.max_length=128", "data.stride=32", f"data.max_train_samples={NUM_QUESTIONS}", "train.epochs=3"),
    *("train.batch_size=24", "train.lr=1e-4", "train.head_lr_scale=10"),
    "train.eval_every=42 steps",  # twice an epoch
)


def questions(data: Path, model: Path, *, num_blocks: int) -> Task:
    """SQuAD by ``data``, with the model in a folder."""
    own = (f"data.path={data}", f"model.name={model.resolve()}")
    rows = (BASELINE, PEER, DEFAULT, _HALF)
    about = (
        f"Windows of 128 tokens, of {NUM_QUESTIONS} questions. F1 in per cent is told, not judged: the dev set has few "
        "questions. No tuned row."
    )
    return Task(
        f"questions-{model.name}",
        CONFIGS / "train_config_squad_all_in_one.yaml",
        (*_COMMON, *_QUESTIONS, *own),
        (),
        num_blocks,
        about,
        rows,
        metric="f1",
        margin=None,
    )
