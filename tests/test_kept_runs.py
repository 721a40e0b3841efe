"""Runs that begin with what an earlier run has stored: the same weights, and nothing that is not theirs."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Timer
from unittest import mock

import pytest
from laws import NUM_BLOCKS, STATIC, Case, Weights, configuration, deviation, final_weights, plain_run, write_replay
from ranks import RankPool

from pipetransformer.cache.identity import Identity
from pipetransformer.cache.kept import Entry, KeptStores
from pipetransformer.process.world import World
from pipetransformer.run import events
from pipetransformer.trainer import Trainer

CASE = Case("vit", 2, ((0, 3, 1),), cached=True)
THAWED = Case("vit", 2, ((0, 3, 1), (6, 1, 2), (11, 4, 1)), cached=True)
NUM_SAMPLES = 150 + 40
HEADS = f"model.kwargs={{patch_size: 2, in_chans: 1, embed_dim: 16, depth: {NUM_BLOCKS}, num_heads: 4}}"


class _Stop(Exception):
    pass


@dataclass(frozen=True)
class Told:
    """A run, as rank 0 tells it.

    Attributes:
        weights: its last weights; None on other ranks, and where it was stopped.
        advances: (step, boundary, number of computed samples, whether all were found, tier) of each advance pass.
        declined: the reason for having no cache; empty where it has one.
        evaluation_s: seconds of all advance passes for what is evaluated on.
        on_disk: the most bytes on disk that count against the budget after an advance.
    """

    weights: Weights | None
    advances: tuple[tuple[int, int, int, bool, str], ...]
    declined: str = ""
    evaluation_s: float = 0.0
    on_disk: int = 0
    rounding: float | None = None


def kept_run(
    world: World,
    case: Case,
    folder: str,
    extra: tuple[str, ...] = (),
    stop_after: int | None = None,
    one_key: bool = False,
    num_nodes: int = 1,
) -> Told:
    """A run that takes its plans from ``case``; ``folder`` has the stores that runs leave."""
    local_size = world.size // num_nodes
    world = replace(world, local_rank=world.rank % local_size, local_size=local_size)
    replay = Path(folder) / f"replay_{world.rank}.jsonl"
    write_replay(replay, case.plans())
    overrides = [*case.overrides(""), f"run.replay={replay}", f"run.dir={folder}", "run.id=kept", *extra]
    overrides += [] if "run.resume=true" in extra else ["run.overwrite=true"]
    advances: list[tuple[int, int, int, bool, str]] = []
    declined: list[str] = []
    evaluating, on_disk, roundings = [0.0], [0], list[float | None]()

    def note(event: events.Event) -> None:
        if isinstance(event, events.Advanced):
            advance = event.advance
            advances.append((event.step, event.boundary, advance.num_samples, advance.is_found, event.tier))
            evaluating.append(advance.evaluation_s)
            roundings.append(advance.rounding)
            on_disk.append(KeptStores(Path(folder) / "cache" / "activations").num_bytes())
        elif isinstance(event, events.CacheDeclined):
            declined.append(event.reason)

    def probe(step: int, gradients: object) -> None:
        if step == stop_after:
            raise _Stop

    key = mock.patch.object(Identity, "key", _key_of_splits) if one_key else mock.patch.dict({}, {})
    weights = None
    with mock.patch.dict(os.environ, {"PIPETRANSFORMER_CACHE": f"{folder}/cache"}), key:
        trainer = Trainer(configuration(case.model, overrides), world, probe=probe, timed=False, listeners=[note])
        try:
            trainer.run()
            weights = final_weights(trainer)
        except _Stop:
            pass
    return Told(weights, tuple(advances), "; ".join(declined), sum(evaluating), max(on_disk), *roundings[:1])


def _key_of_splits(self: Identity, boundary: int, layouts: Mapping[str, object], **_: object) -> str:
    return "-".join(layouts)


def plain(case: Case, *extra: str) -> Weights:
    frozen = tuple((step, frozen) for step, frozen, _ in case.moves)
    return plain_run(case.model, frozen, (*case.overrides(""), *extra))[0]


def check(told: Told, expected: Weights) -> None:
    assert told.weights is not None and deviation(told.weights, expected) < 1e-10


def test_the_second_run_computes_nothing_and_ends_with_the_same_bits(ranks: RankPool, tmp_path: Path) -> None:
    first, *_ = ranks.run(2, kept_run, CASE, str(tmp_path))
    second, *others = ranks.run(2, kept_run, CASE, str(tmp_path))
    assert first.advances == ((0, 3, NUM_SAMPLES, False, "disk"),)
    assert second.advances == ((0, 3, 0, True, "disk"),) == others[0].advances
    assert first.weights is not None and second.weights is not None
    assert all((first.weights[name] == second.weights[name]).all() for name in first.weights)
    check(second, plain(CASE))


@pytest.mark.parametrize(
    ("case", "extra", "computed"),
    [
        (CASE, ("train.seed=1",), 190),  # other random weights
        (CASE, ("data.max_train_samples=149",), 149),
        (CASE, ("data.max_eval_samples=39",), 39),
        (CASE, ("cache.dtype=float32",), 190),
        (CASE, ("train.batch_size=30",), 190),  # another shape of the pass
        (replace(CASE, moves=((0, 2, 1),)), (), 190),
        (replace(CASE, precision="float32"), (), 190),
        (CASE, (HEADS,), 190),  # the same weights, which no module of timm's tells apart
    ],
    ids=["weights", "data", "evaluation data", "dtype", "rows", "boundary", "precision", "heads"],
)
def test_what_depends_on_something_else_is_computed(
    case: Case, extra: tuple[str, ...], computed: int, ranks: RankPool, tmp_path: Path
) -> None:
    """And nothing more: other data to evaluate on leave the samples of training, and the other way round."""
    ranks.run(2, kept_run, CASE, str(tmp_path))
    told, *_ = ranks.run(2, kept_run, case, str(tmp_path), extra)
    assert [advance[2:4] for advance in told.advances] == [(computed, False)]
    entries = KeptStores(tmp_path / "cache" / "activations").entries()
    assert len(entries) == (4 if computed == NUM_SAMPLES else 3), "each has a key of its own"
    if computed != NUM_SAMPLES:
        check(told, plain(case, *extra))


def test_stores_are_kept_through_thaw_and_refreeze(ranks: RankPool, tmp_path: Path) -> None:
    """The stores of others are never written: a later run finds them as they were."""
    for is_found in (False, True, True):
        told, *_ = ranks.run(2, kept_run, THAWED, str(tmp_path))
        start, thawed, again = told.advances
        assert (start[3], start[4]) == (is_found, "disk")
        assert thawed == (6, 1, NUM_SAMPLES, False, "host") and again == (11, 4, NUM_SAMPLES, False, "host")
        check(told, plain(THAWED))


def test_a_run_that_finds_rounded_activations_tells_their_error(ranks: RankPool, tmp_path: Path) -> None:
    extra = ("cache.dtype=int8", "train.precision=float32")
    filled, found = [ranks.run(2, kept_run, CASE, str(tmp_path), extra) for _ in range(2)]
    assert [told.advances[0][3] for told in (filled[0], found[0])] == [False, True]
    errors = [told.rounding for told in (*filled, *found)]
    assert all(error is not None and 0.001 < error < 0.02 for error in errors), errors
    assert found[0].rounding == found[1].rounding, "the largest of all ranks"


def test_a_later_boundary_is_computed_from_the_kept_one(ranks: RankPool, tmp_path: Path) -> None:
    case = replace(CASE, moves=((0, 2, 1), (7, 4, 2)))
    for is_found in (False, True):
        told, *_ = ranks.run(2, kept_run, case, str(tmp_path))
        assert [advance[:2] for advance in told.advances] == [(0, 2), (7, 4)]
        assert [advance[3:] for advance in told.advances] == [(is_found, "disk"), (False, "host")]
        check(told, plain(case))


def test_the_kept_boundary_stays_where_a_later_one_has_no_room(ranks: RankPool, tmp_path: Path) -> None:
    case = replace(CASE, moves=((0, 2, 1), (7, 4, 2)))
    ranks.run(2, kept_run, case, str(tmp_path))
    room = sum(entry.num_bytes for entry in entries_of(tmp_path))
    small = ("cache.host_budget=1 KB", f"cache.disk_budget={room}")
    told, *_ = ranks.run(2, kept_run, case, str(tmp_path), small)
    assert told.advances == ((0, 2, 0, True, "disk"),) and "its budget is 0.0 MB" in told.declined
    assert json.loads((tmp_path / "kept" / "summary.json").read_text())["cache"]["misses"] == 0
    check(told, plain(case))


def test_a_resumed_run_finds_what_it_had(ranks: RankPool, tmp_path: Path) -> None:
    saving = ("checkpoint.every=3 steps",)
    ranks.run(2, kept_run, CASE, str(tmp_path), saving, 7)
    # What was interrupted while it was published is filled again; here the publication had ended, or not.
    told, *_ = ranks.run(2, kept_run, CASE, str(tmp_path), (*saving, "run.resume=true"))
    assert told.advances[0][4] == "disk" and told.advances[0][1] == 3
    check(told, plain(CASE))
    again, *_ = ranks.run(2, kept_run, CASE, str(tmp_path))
    assert again.advances[0][3]


def test_what_is_filled_block_by_block_is_left_once_it_is_whole(ranks: RankPool, tmp_path: Path) -> None:
    """A resumption without the entries fills them again, boundary by boundary; no later run sees one on its way."""
    case, saving = Case("vit", 2, ((0, 3, 2),), 2, cached=True, prefixes=("streamed",)), ("checkpoint.every=3 steps",)
    ranks.run(2, kept_run, case, str(tmp_path), saving, 7)
    stores = KeptStores(tmp_path / "cache" / "activations")
    stores.clear()
    told, *_ = ranks.run(2, kept_run, case, str(tmp_path), (*saving, "run.resume=true"))
    assert [advance[1] for advance in told.advances] == [1, 2, 3]
    check(told, plain(case))
    assert [entry.about["boundary"] for entry in stores.entries()] == [3, 3]
    again, *_ = ranks.run(2, kept_run, case, str(tmp_path))
    assert again.advances == ((0, 3, 0, True, "disk"),)
    check(again, plain(case))


def test_a_store_with_other_activations_is_replaced(ranks: RankPool, tmp_path: Path) -> None:
    """Whatever the key has left out: a batch of each rank is computed and compared."""
    ranks.run(2, kept_run, CASE, str(tmp_path), (), None, True)
    other = ("train.seed=1",)
    told, *_ = ranks.run(2, kept_run, CASE, str(tmp_path), other, None, True)
    assert told.advances == ((0, 3, NUM_SAMPLES, False, "host"),)
    events_of_run = map(json.loads, (tmp_path / "kept" / "events.jsonl").read_text().splitlines())
    assert [each["replaces"] for each in events_of_run if each["event"] == "advance"] == [True]
    check(told, plain(CASE, *other))
    assert not KeptStores(tmp_path / "cache" / "activations").entries()


def test_of_two_entries_the_one_that_agrees_stays(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, kept_run, CASE, str(tmp_path))
    training, evaluated = entries_of(tmp_path)
    place = tmp_path / "cache" / "activations" / evaluated.key
    store, record = place / "eval.store", json.loads((place / "record.json").read_text())
    content = bytearray(store.read_bytes())
    content[: len(content) // 2] = bytes(byte ^ 1 for byte in content[: len(content) // 2])
    store.write_bytes(content)
    record["digests"]["eval"] = hashlib.sha256(content).hexdigest()
    (place / "record.json").write_text(json.dumps(record))
    told, *_ = ranks.run(2, kept_run, CASE, str(tmp_path))
    assert told.advances == ((0, 3, NUM_SAMPLES, False, "host"),)
    check(told, plain(CASE))
    assert [entry.key for entry in KeptStores(tmp_path / "cache" / "activations").entries()] == [training.key]


def entries_of(folder: Path) -> tuple[Entry, Entry]:
    """Training's entry, and that of what is evaluated on."""
    found = KeptStores(folder / "cache" / "activations").entries()
    training, evaluated = sorted(found, key=lambda entry: "eval" in entry.about["samples"])
    return training, evaluated


def test_an_entry_that_cannot_be_had_leaves_the_other(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, kept_run, CASE, str(tmp_path))
    before = entries_of(tmp_path)
    more = ("data.max_eval_samples=60", f"cache.disk_budget={sum(entry.num_bytes for entry in before)}")
    told, *_ = ranks.run(2, kept_run, CASE, str(tmp_path), more)
    assert told.advances == ((0, 3, 60, False, "disk"),), "training's stores are found, the others have no room"
    check(told, plain(CASE))
    assert [entry.key for entry in entries_of(tmp_path)] == [entry.key for entry in before]


def test_two_entries_together_stay_within_the_budget(ranks: RankPool, tmp_path: Path) -> None:
    """None of their files is there when the second one is begun."""
    ranks.run(2, kept_run, CASE, str(tmp_path))
    training, evaluated = entries_of(tmp_path)
    KeptStores(tmp_path / "cache" / "activations").clear()
    small = (f"cache.disk_budget={training.num_bytes + evaluated.num_bytes - 1}",)
    told, *_ = ranks.run(2, kept_run, CASE, str(tmp_path), small)
    check(told, plain(CASE))
    assert [entry.key for entry in KeptStores(tmp_path / "cache" / "activations").entries()] == [training.key]


@pytest.mark.parametrize("fills", [False, True], ids=["reads", "fills"])
def test_who_fills_an_entry_waits_for_no_other(fills: bool, ranks: RankPool, tmp_path: Path) -> None:
    """Another job holds what is evaluated on: who only reads waits for it, which is no training."""
    ranks.run(2, kept_run, CASE, str(tmp_path))
    stores, (_, evaluated) = KeptStores(tmp_path / "cache" / "activations"), entries_of(tmp_path)
    assert stores.delete(evaluated.key)
    held = stores.begin(evaluated.key, sizes={"eval": evaluated.num_bytes}, budget=10**9)
    assert held is not None
    timer = Timer(3.0, held.close)
    timer.start()
    extra = ("data.max_train_samples=149",) if fills else ()
    told, *_ = ranks.run(2, kept_run, CASE, str(tmp_path), extra)
    assert timer.is_alive() == fills
    timer.join()
    assert told.advances == ((0, 3, (149 if fills else 0) + 40, False, "disk"),)
    assert (told.evaluation_s > 1) == (not fills)
    check(told, plain(CASE, *extra))


def test_what_memory_cannot_hold_lies_on_disk(ranks: RankPool, tmp_path: Path) -> None:
    small = ("cache.host_budget=1 KB",)
    case = replace(CASE, moves=((0, 0, 1), (5, 3, 1)))
    told, *_ = ranks.run(2, kept_run, case, str(tmp_path), small)
    assert told.advances == ((5, 3, NUM_SAMPLES, False, "disk"),) and not told.declined
    check(told, plain(case))
    assert told.on_disk > 1000, "other jobs leave room for it"
    assert not list((tmp_path / "cache" / "activations").iterdir()), "it goes with the job, and so does its lock"
    told, *_ = ranks.run(2, kept_run, case, str(tmp_path), (*small, "cache.disk_budget=1 KB"))
    assert not told.advances and "cache.disk_budget has room for 0.0 MB" in told.declined
    told, *_ = ranks.run(2, kept_run, case, str(tmp_path), (*small, "cache.disk_budget=null"))
    assert not told.advances and "its budget is 0.0 MB" in told.declined
    check(told, plain(case))


def test_without_a_disk_budget_nothing_is_left(ranks: RankPool, tmp_path: Path) -> None:
    told, *_ = ranks.run(2, kept_run, CASE, str(tmp_path), ("cache.disk_budget=null",))
    assert told.advances == ((0, 3, NUM_SAMPLES, False, "host"),)
    assert not (tmp_path / "cache" / "activations").exists()


def test_a_run_that_never_freezes_keeps_nothing(ranks: RankPool, tmp_path: Path) -> None:
    told, *_ = ranks.run(2, kept_run, replace(CASE, moves=STATIC[1]), str(tmp_path))
    assert not told.advances and not (tmp_path / "cache" / "activations").exists()


@pytest.mark.parametrize("lost", range(4))
def test_a_node_that_has_lost_its_stores_fills_them_again_beside_one_that_has_them(
    lost: int, ranks: RankPool, tmp_path: Path
) -> None:
    stores, weights = KeptStores(tmp_path / "cache" / "activations"), plain_of_nodes(CASE, num_nodes=2)
    told, *_ = ranks.run(2, kept_run, CASE, str(tmp_path), (), None, False, 2)
    assert [advance[2:] for advance in told.advances] == [(NUM_SAMPLES, False, "disk")]
    check(told, weights)
    entries = stores.entries()
    assert len(entries) == 4, "two a node"
    assert stores.delete(entries[lost].key)
    told, *_ = ranks.run(2, kept_run, CASE, str(tmp_path), (), None, False, 2)
    assert [advance[3:] for advance in told.advances] == [(False, "disk")] and 0 < told.advances[0][2] < NUM_SAMPLES
    check(told, weights)
    told, *_ = ranks.run(2, kept_run, CASE, str(tmp_path), (), None, False, 2)
    assert [advance[2:] for advance in told.advances] == [(0, True, "disk")]


def plain_of_nodes(case: Case, *, num_nodes: int) -> Weights:
    frozen = tuple((step, frozen) for step, frozen, _ in case.moves)
    return plain_run(case.model, frozen, tuple(case.overrides("")), num_nodes)[0]
