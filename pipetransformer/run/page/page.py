"""The page itself: words and tables around the figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from pipetransformer.config.secrets import masked
from pipetransformer.process.files import write_whole
from pipetransformer.run.page import figures
from pipetransformer.run.page.history import History
from pipetransformer.run.tracking.summary import parts_of_time

_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1c2430; --soft: #5d6b7c; --line: #d9dfe6; --card: #f6f8fa }
@media (prefers-color-scheme: dark) {
  :root { --paper: #12171e; --ink: #e4e9ef; --soft: #97a5b5; --line: #2c3643; --card: #1a212b }
}
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1rem; max-width: 1180px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif }
h1 { font-size: 1.5rem; margin: .4rem 0 } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
p, figcaption { color: var(--soft); margin: .3rem 0 }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .6rem; margin: 1rem 0 }
.facts div { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .5rem .7rem }
.facts b { display: block; font-size: 1.15rem } .facts span { color: var(--soft); font-size: .85rem }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr)); gap: 1rem }
figure { margin: 0; min-width: 0 } figure svg { width: 100%; height: auto; display: block }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-size: .88rem; width: 100% }
td, th { text-align: left; padding: .25rem .6rem .25rem 0; border-bottom: 1px solid var(--line); vertical-align: top }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums }
pre { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .7rem; overflow-x: auto;
  font-size: .82rem; white-space: pre-wrap; overflow-wrap: anywhere }
details summary { cursor: pointer; margin: 1rem 0 .4rem; font-weight: 600 }
"""


def write_report(runs: Sequence[History], path: Path) -> None:
    """Writes the page of one run, or of several beside each other.

    Raises:
        UserError: it cannot be written.
    """
    parts = list(_of_one(runs[0]) if len(runs) == 1 else _of_several(runs))
    title = ", ".join(run.run_id for run in runs)
    body = "\n".join(parts)
    view = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    head = f'<meta charset="utf-8">{view}<title>{escape(title)}</title><style>{_STYLE}</style>'
    text = f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'
    write_whole(path, text, key="report.html")


def _of_one(run: History) -> Iterator[str]:
    summary = run.summary
    yield f"<h1>{escape(run.run_id)}</h1>"
    if summary:
        about = f"{summary['task'].replace('_', ' ')}: {summary['model']} on {summary['dataset']}"
        yield f"<p>{escape(about)}</p>"
    yield _facts(_headline(run))
    if run.evaluations:
        yield "<h2>Metric and loss</h2>"
        yield _grid(
            *((figures.metric([run], over=over), f"{run.best_by} over {words}") for over, words in _AXES),
            *((figures.loss([run], over=over), f"loss over {words}") for over, words in _AXES),
        )
    if run.steps and run.plans:
        yield "<h2>What froze, when and why</h2>"
        yield _grid(
            (
                figures.freeze(run),
                "Blocks from the first (0, below) to the last. Colour: the mean norm of a block's gradient.",
            ),
            (figures.throughput([run]), "Samples a second; numbers: pipeline length x replicas from there on."),
        )
        yield _table(("step", "what", "why"), _decisions(run))
        yield "<h2>Where a step's time goes</h2>"
        yield _grid(
            (
                figures.balance(run),
                "Each rank's seconds by phase; ranks of a balanced pipeline are as high as each other.",
            ),
            *((figures.timeline(*drawn), _STEP_WORDS) for drawn in _shown_steps(run)),
        )
    if summary:
        yield "<h2>Memory, cache and time</h2>"
        shown = [(figures.memory(run), "The most memory of each rank.")]
        if any(point.figures["hits"] + point.figures["misses"] for point in run.steps):
            shown.append((figures.cache(run), _cache_words(summary)))
        times = parts_of_time(summary)
        shown.append((figures.times(times), f"All {summary['wall_s']:.1f} seconds of the run."))
        yield _grid(*shown)
        wall = summary["wall_s"] or 1.0
        rows = [(name, f"{seconds:.2f}", f"{100 * seconds / wall:.1f} %") for name, seconds in times]
        yield _table(("time", "seconds", "share"), rows, numbers=(1, 2))
    yield "<h2>Repeat it</h2>"
    yield f"<pre>{escape(_again(run))}</pre>"
    yield f"<details><summary>Configuration</summary><pre>{escape(masked(run.config))}</pre></details>"


def _shown_steps(run: History) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """Those of the first plans and of the last."""
    drawn = [(name, work) for name, work in run.drawn if work]
    return drawn if len(drawn) <= _MOST_STEPS else [*drawn[: _MOST_STEPS - 1], drawn[-1]]


_MOST_STEPS = 4
_STEP_WORDS = (
    "A real step, micro-batches by their numbers (on a GPU, the launches of its kernels); timeline.json in the run's "
    "folder opens in ui.perfetto.dev."
)
_AXES = (("train_s", "time"), ("step", "steps"))


def _of_several(runs: Sequence[History]) -> Iterator[str]:
    yield f"<h1>{len(runs)} runs</h1>"
    rows = []
    for run in runs:
        summary = run.summary
        best = float("nan") if run.best is None else run.best.figures[run.best_by]
        last = run.evaluations[-1].figures[run.best_by] if run.evaluations else float("nan")
        seconds = summary.get("train_s", run.steps[-1].train_s if run.steps else 0.0)
        rows.append((run.run_id, run.best_by, f"{best:.4f}", f"{last:.4f}", f"{seconds:.1f}", _froze(run)))
    yield _table(("run", "metric", "best", "final", "train s", "frozen blocks"), rows, numbers=(2, 3, 4))
    yield "<h2>Metric and loss</h2>"
    yield _grid(
        *((figures.metric(runs, over=over), f"metric over {words}") for over, words in _AXES),
        *((figures.loss(runs, over=over), f"loss over {words}") for over, words in _AXES),
    )
    yield "<h2>What froze, and how fast it went</h2>"
    yield _grid((figures.frozen(runs), "Frozen blocks over time."), (figures.throughput(runs), "Samples a second."))
    yield "<h2>What is not the same</h2>"
    yield _table(("key", *(run.run_id for run in runs)), _differences(runs))


def _headline(run: History) -> list[tuple[str, str]]:
    """(value, name) of the first figures that one looks for."""
    found: list[tuple[str, str]] = []
    if (best := run.best) is not None:
        found.append((f"{best.figures[run.best_by]:.4f}", f"best {run.best_by}, at step {best.step}"))
        found.append((f"{run.evaluations[-1].figures[run.best_by]:.4f}", f"final {run.best_by}"))
    if summary := run.summary:
        found += [(f"{summary['train_s']:.1f} s", "training"), (f"{summary['wall_s']:.1f} s", "whole run")]
        found.append((f"{summary['world_size']}", "ranks"))
    if run.plans:
        found.append((f"{run.plans[-1].plan['frozen']} of {run.num_blocks}", "blocks frozen at the end"))
    return found


def _froze(run: History) -> str:
    changes = [(c.step, int(c.plan["frozen"])) for c in run.plans]
    told = [f"{n} at {step}" for (step, n), (_, before) in zip(changes[1:], changes) if n != before]
    first = f"{changes[0][1]} from the start" if changes and changes[0][1] else ""
    return ", ".join(filter(None, (first, *told))) or "none"


def _decisions(run: History) -> Iterator[tuple[str, str, str]]:
    before: tuple[object, ...] = ()
    for step, kind, event in run.told:
        if kind == "freeze_decision":
            now = (event["frozen"], event["reason"])
            if now == before or (event["asked"] is None and not event["reason"]):
                continue
            before = now
            yield str(step), f"AutoFreeze: {event['frozen']} blocks", _why(event)
        elif kind == "probe":
            yield str(step), f"linear probe: {event['free']} blocks are free", _scores(event["scores"])
        elif kind == "guard" and event.get("judged"):
            words = "undone" if event["undone"] else "kept"
            expected = f"{event['predicted']:.4f} ± {event['error']:.4f}"
            why = f"loss of the samples set aside {event['loss']:.4f}, predicted {expected}"
            yield str(step), f"guard: the freeze is {words}", why
        elif kind == "held":
            yield str(step), f"{event['frozen']} blocks where AutoFreeze wants {event['wanted']}", str(event["reason"])
        elif kind == "transition":
            plan = event["plan"]
            words = f"pp {plan['pp']} x dp {plan['dp']}, M {plan['num_microbatches']}, {plan['frozen']} frozen"
            yield (
                str(step),
                words,
                f"{event['reason']}; {event['seconds']:.2f} s, {event['bytes_moved'] / 1e6:.1f} MB moved",
            )
        elif kind in ("cache_declined", "not_saved"):
            yield str(step), kind.replace("_", " "), str(event["reason"])
        elif kind == "resume":
            yield str(step), "resumed", str(event["resumed_from"])


def _scores(scores: Sequence[float] | None) -> str:
    if scores is None:
        return "there is none for questions"
    told = ", ".join(f"{score:.2f}" for score in scores)
    return f"share of the labels' variance that it explains, behind the stem and each block: {told}"


def _why(event: Any) -> str:
    parts = [event["reason"]] if event["reason"] else []
    if event.get("norms"):
        parts.append("norms " + ", ".join(f"{norm:.3g}" for norm in event["norms"]))
    for frozen, saved, spent in event.get("payoffs") or ():
        parts.append(f"{frozen} blocks would save {saved:.1f} s and cost {spent:.1f} s")
    return "; ".join(parts) or "as its rule says"


def _cache_words(summary: dict[str, Any]) -> str:
    used = summary["cache"]
    held = ", ".join(f"{size / 1e6:.0f} MB on {tier}" for tier, size in used["bytes"].items() if size)
    return f"{used['hits']:,} samples read, {used['misses']:,} computed; {held or 'nothing'} held."


def _again(run: History) -> str:
    config = run.folder / "config.yaml"
    same = f"pipetransformer train {config} run.id=again run.replay={run.folder / 'events.jsonl'}"
    ranks = int(run.summary.get("world_size", 1))
    if run.summary.get("task") == "own":
        return f"pipetransformer.train(model, train_dataset, eval_dataset, {str(config)!r}, blocks=...)"
    return "\n".join(
        (
            f"pipetransformer train {config} --ranks {ranks} run.id=again     # decisions anew",
            f"{same} --ranks {ranks}     # the same plans",
            f"pipetransformer predict {run.folder} DATA",
        )
    )


def _differences(runs: Sequence[History]) -> Iterator[tuple[str, ...]]:
    """Keys of the configurations that are not alike, run by run."""
    import yaml

    flat = [dict(_leaves(yaml.safe_load(run.config))) for run in runs]
    for key in dict.fromkeys(key for each in flat for key in each):
        values = [masked(str(each.get(key, ""))) for each in flat]
        if len(set(values)) > 1 and key not in ("run.id", "log.name"):
            yield (key, *values)


def _leaves(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


# ---- pieces of HTML --------------------------------------------------------------------------------------------------


def _facts(pairs: Sequence[tuple[str, str]]) -> str:
    cards = "".join(f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for value, name in pairs)
    return f'<div class="facts">{cards}</div>'


def _grid(*shown: tuple[str, str]) -> str:
    cells = "".join(f"<figure>{svg}<figcaption>{escape(words)}</figcaption></figure>" for svg, words in shown)
    return f'<div class="grid">{cells}</div>'


def _table(
    titles: Sequence[str], rows: Iterator[Sequence[str]] | Sequence[Sequence[str]], *, numbers: Sequence[int] = ()
) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        marks = [' class="n"' if number in numbers else "" for number in range(len(cells))]
        return "<tr>" + "".join(f"<{tag}{mark}>{escape(cell)}</{tag}>" for cell, mark in zip(cells, marks)) + "</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f'<div class="scroll"><table>{line(titles, "th")}{body}</table></div>'
