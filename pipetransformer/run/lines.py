"""The lines that a run prints of its decisions, as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pipetransformer.config import Config
from pipetransformer.data import SET_ASIDE, Dataset
from pipetransformer.data.reading import LABEL_MARK
from pipetransformer.freeze import FEWEST_STEPS, NEARLY_ALL, NOISE, FreezeDecision, Freezing, Verdict, transfer
from pipetransformer.pipe.measure.static_layouts import StaticLayouts
from pipetransformer.plan import ParallelPlan
from pipetransformer.run.events import Advanced, Moved, NotSaved

__all__ = [
    "of_advance",
    "of_data",
    "of_decision",
    "of_ended",
    "of_freezing",
    "of_layouts",
    "of_move",
    "of_not_saved",
    "of_probe",
    "of_start",
    "of_verdict",
]

_EARLY = 2 / 3  # of a run
_COLUMNS = 13  # of the table of the probe
_MOST_NAMES = 5  # of classes


def of_ended(run_id: str, *, steps: int) -> str:
    """A run to be resumed that has ended."""
    return (
        f"run {run_id} has ended: its {steps} steps are done; give more train.epochs to go on from its last "
        "checkpoint, or another run.id"
    )


def of_data(datasets: Mapping[str, Dataset], *, label_names: Sequence[str]) -> str:
    """How much of each split was read, and from where; and the classes."""
    splits = {split: data for split, data in datasets.items() if split != SET_ASIDE}
    told = [f"{split} {data.extent or len(data)} from {data.place}" for split, data in splits.items()]
    if SET_ASIDE in datasets:
        told[0] += f", {len(datasets[SET_ASIDE]):,} of them set aside for the guard"
    names = [*label_names[:_MOST_NAMES], *(["..."] if len(label_names) > _MOST_NAMES else [])]
    kind = "labels" if datasets["train"].kind == "labels" else "classes"
    classes = f"; {len(label_names)} {kind}: {', '.join(names)}" if label_names else ""
    several = kind == "classes" and any(LABEL_MARK in name for name in label_names)
    hint = "; if a text may have several labels, give data.label_kind=labels" if several else ""
    return f"data: {', '.join(told)}{classes}{hint}"


def of_layouts(layouts: StaticLayouts) -> str:
    """The static layouts that were timed, and the best."""
    told = ", ".join(
        f"pp {pp} x dp {plan.dp} (M {plan.num_microbatches}) {layouts.mean_seconds[pp] * 1e3:.0f} ms"
        for pp, plan in layouts.plans.items()
    )
    rounds = [f"{seconds * 1e3:.0f}" for seconds in layouts.rounds]
    most_common = f"its steps of the most common size took {', '.join(rounds)} ms"
    left_out = f"; not timed, to save time: pp {', '.join(map(str, layouts.left_out))}" if layouts.left_out else ""
    best = f"best is pp {layouts.best_pp}, {most_common}"
    return f"static layouts, a full step of mean length: {told}; {best}{left_out}"


def of_probe(scores: Sequence[float] | None, *, free: int, seconds: float) -> Iterator[str]:
    """The number of blocks to start with, and a table of the scores of the linear probe at every boundary."""
    if scores is None:
        yield "linear probe: there is none for questions, whose labels are positions"
        return
    found = f"the blocks hold {transfer(scores):.0%} of what the stem does not tell of the labels"
    advice = f"start with {free or 'none'} of {len(scores) - 1} blocks frozen"
    if scores[0] > NEARLY_ALL:
        found = "the stem alone tells nearly all of the labels, so that nothing is known of the blocks"
    elif transfer(scores) < NOISE:
        advice = "do not freeze here: training must change them"
    yield f"linear probe: before any training, {found}: {advice} ({seconds:.1f} s)"
    yield "  share of the labels' variance that a linear head explains, behind the stem and each block:"
    names = ["stem", *map(str, range(1, len(scores)))]
    for first in range(0, len(scores), _COLUMNS):
        columns = slice(first, first + _COLUMNS)
        yield "  behind   " + "".join(f"{name:>6}" for name in names[columns])
        yield "  explained" + "".join(f"{score:>6.2f}" for score in scores[columns])


def of_start(run_id: str, config: Config, plan: ParallelPlan, *, total_steps: int, resumed_from: str | None) -> str:
    """The job, and its first plan."""
    come_from = f"from {resumed_from}" if resumed_from else "from the start"
    return (
        f"run {run_id}: {config.model.name} ({plan.num_blocks} blocks) on {config.data.name}, "
        f"{total_steps} steps {come_from} with pp {plan.pp} x dp {plan.dp}, M {plan.num_microbatches}"
        f"{' (pipe.initial_length)' if isinstance(config.pipe.initial_length, int) else ''}, "
        f"{'the stem and ' if plan.stem_frozen else ''}{plan.frozen} blocks frozen"
    )


def of_freezing(freezing: Freezing, config: Config, *, plan: ParallelPlan, total_steps: int) -> Iterator[str]:
    """How pictures are cached, and what the freeze policy will do, as far as it is known before training; warnings."""
    if config.data.augment != "none" and isinstance(config.cache.views, int):
        yield f"augmented pictures: {config.cache.views} views of each in turn (cache.views)"
    if not total_steps:
        return
    if freezing.lacks_guard:
        wanted, why = config.freeze.guard_samples, "too few samples, or freeze.guard_samples is none"
        if total_steps <= FEWEST_STEPS:
            why = f"too few steps ({total_steps}; more than {FEWEST_STEPS} are needed)"
        elif isinstance(wanted, int):
            why = f"too few steps ({total_steps}) for freeze.guard_samples {wanted}"
        yield f"freeze.guard: no samples are set aside, and no freeze is judged: {why}"
    if config.freeze.policy == "guarded":
        if not config.freeze.guard:
            yield "freeze.guard=false changes nothing: freeze.policy guarded is nothing without it; give another policy"
        if freezing.rests:
            more = "nothing more" if plan.frozen else "nothing"
            judged = ", and none that froze later would be judged" if freezing.lacks_guard else ""
            yield (
                f"{more} will freeze: no linear probe shows blocks to be free{judged}; to freeze all the same, give "
                "another freeze.policy, as static with freeze.max_frozen"
            )
        elif freezing.lacks_guard:
            yield "freeze.policy guarded freezes only blocks that the linear probe shows to be free in this run"
    if freezing.early:
        yield (
            f"warning: {freezing.early} blocks froze for the end of a shorter run and stay frozen in this one; to "
            "train them longer, begin anew with all epochs"
        )
    if freezing.never:
        judged = " that the guard can judge; give a shorter freeze.every"
        judged += "" if config.freeze.policy == "guarded" else ", or freeze.guard=false"
        yield (
            f"{'nothing more' if plan.frozen else 'nothing'} will freeze: freeze.warmup, freeze.every and "
            f"freeze.patience leave too few decisions in this run{judged if freezing.is_watched else ''}"
        )
    if not freezing.schedule:
        return
    each = ", ".join(f"{frozen} from step {step} on" for step, frozen in freezing.schedule)
    watched = ", as far as the guard allows" if freezing.is_watched else ""
    yield f"blocks to be frozen, of {plan.num_blocks}: {each}{watched}"
    step, frozen = freezing.schedule[-1]
    if frozen == plan.num_blocks and step < _EARLY * total_steps:
        yield (
            f"warning: all blocks freeze at step {step} of {total_steps}; the head alone learns from then on, which "
            "often costs accuracy; set freeze.max_frozen, or a longer freeze.every"
        )


def of_decision(decision: FreezeDecision, *, policy: str) -> str:
    """A decision, with its evidence."""
    payoffs = ", ".join(
        f"{frozen} would save {saved:.1f} s for {spent:.1f} s" for frozen, saved, spent in decision.payoffs
    )
    if decision.asked is None:
        return f"step {decision.step}: {decision.frozen} frozen blocks, because {decision.reason}"
    asks = f"step {decision.step}: freeze.policy {policy} asks for {decision.asked} frozen blocks"
    told = [] if decision.to_come is None else [f"{decision.to_come:.0%} of the sum of the learning rates is to come"]
    told += [f"predicted: {payoffs}"] if payoffs else []
    evidence = f" ({'; '.join(told)})" if told else ""
    allowed = f"; {decision.frozen}, because {decision.reason}" if decision.reason else ""
    return f"{asks}{evidence}{allowed}"


def of_move(event: Moved) -> str:
    """What a transition has changed."""
    before, after = (
        {"frozen": p.frozen, "pp": p.pp, "dp": p.dp, "M": p.num_microbatches, "schedule": p.schedule}
        for p in (event.old, event.plan)
    )
    changed = [f"{name} {then} -> {after[name]}" for name, then in before.items() if then != after[name]]
    return (
        f"step {event.step}: {', '.join(changed) or 'another cut or cache'}, "
        f"moved {event.move.num_bytes / 1e6:.1f} MB in {event.move.seconds:.3f} s ({event.reason})"
    )


def of_verdict(verdict: Verdict) -> str:
    """The guard's answer to a tentative freeze."""
    what = "undone" if verdict.undone else "kept"
    return (
        f"step {verdict.step}: the freeze is {what}: loss of the samples set aside {verdict.loss:.4f}, "
        f"predicted {verdict.predicted:.4f} ± {verdict.error:.4f}"
    )


def of_not_saved(event: NotSaved) -> str:
    """A warning: what was to be written is not there."""
    good = f"the last good checkpoint is {event.good}" if event.good else "there is no good checkpoint"
    return f"warning: step {event.step}: {event.what} is not saved ({event.reason}); training goes on; {good}"


def of_advance(event: Advanced, *, dtype: str) -> str:
    """The pass, and the error of rounding by ``cache.dtype``."""
    advance = event.advance
    found = "took over an earlier run's cache" if advance.is_found else f"cached {advance.samples.total()} samples"
    found = f"an earlier run had cached other activations, now deleted; {found}" if advance.replaces else found
    others = f", {advance.evaluation_samples} to evaluate on in {advance.evaluation_s:.2f} s"
    if not advance.evaluation_samples:
        waited = f" after {advance.evaluation_s:.2f} s of waiting for those to evaluate on"
        others = waited if advance.evaluation_s >= 1 else ""
    place = {"host": "host memory", "disk": "disk"}[event.tier]
    off = f"; {dtype} rounds them by {advance.rounding:.2%}" if advance.rounding else ""
    return (
        f"step {event.step}: {found} at block {event.boundary} "
        f"in {advance.seconds:.2f} s{others} ({event.num_bytes / 1e6:.0f} MB of {place} a node{off})"
    )
