"""What the table of ResNet-101's accuracy claims: its recipes, two methods that train alike, runs that go on."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from laws import REPOSITORY
from PIL import Image
from ranks import RankPool
from scipy.stats import ttest_ind
from torch import Tensor

sys.path.insert(0, str(REPOSITORY))

import benchmarks.resnet101_accuracy.__main__ as script
from benchmarks.resnet101_accuracy import training
from benchmarks.resnet101_accuracy.kept import CODE, FILE, KeptRuns, key_of
from benchmarks.resnet101_accuracy.network import Network, Recipe, learning_rate
from benchmarks.resnet101_accuracy.pictures import FolderPictures, PictureSet, batches, find_pictures
from benchmarks.resnet101_accuracy.report import compare, rows_of, tell
from benchmarks.resnet101_accuracy.sizes import PAIRS, PUBLISHED, Experiment, Size, original, small
from benchmarks.resnet101_accuracy.training import Job, Outcome, Run, Training, train
from benchmarks.support import kept as kept_rows
from benchmarks.support.graphs import GraphBench, Setting
from pipetransformer.errors import UserError
from pipetransformer.launch.entry import run_guarded
from pipetransformer.process.world import World

IMAGENET = PictureSet("class folders", 1000, 1_281_167, 50_000, 224)
TINY = Network((1, 1, 1, 1), (4, 4, 4, 4), channels_last=True)
REPLICAS, STAGES = Setting("dataparallel-256", 2, 8, checkpoint=None), Setting("pipeline-256", 2, 8, 2)


# ---- recipes ---------------------------------------------------------------------------------------------------------


def test_the_learning_rate_is_the_originals() -> None:
    """At batch 1,024: 4 epochs of warm-up from 0.1 to 0.4, then a tenth at 30, 60 and 80 of 90 epochs."""
    rate = partial(Recipe().rate, batch_size=1024)
    at = {0: 0.1, 2: 0.25, 4: 0.4, 29: 0.4, 31: 0.04, 61: 0.004, 81: 0.0004}
    assert {epoch: rate(epoch / 90) for epoch in at} == pytest.approx(at)
    assert learning_rate(0.2, multiplier=0.5) == pytest.approx(0.1)


def test_the_small_tables_learning_rate_is_a_line_up_and_a_line_down() -> None:
    recipe = Recipe(base_rate=0.05, base_batch=32, schedule="line")
    rates = {share: recipe.rate(share, batch_size=128) for share in (0.0, 0.05, 0.1, 0.55, 1.0)}
    assert rates == pytest.approx({0.0: 0.0, 0.05: 0.1, 0.1: 0.2, 0.55: 0.1, 1.0: 0.0})


def test_class_folders_are_trained_as_the_original_trained_imagenet() -> None:
    size = original(IMAGENET)
    assert [(s.name, s.num_devices, s.batch_size, s.num_microbatches, s.checkpoint) for s in size.settings] == [
        ("dataparallel-256", 2, 256, 1, None),
        ("dataparallel-1k", 8, 1024, 1, None),
        ("pipeline-256", 2, 256, 4, "except_last"),
        ("pipeline-1k", 8, 1024, 64, "except_last"),
        ("pipeline-4k", 8, 4096, 64, "except_last"),
    ]
    assert [setting.name for setting in size.settings] == list(PUBLISHED)
    recipe = size.recipe
    assert (recipe.epochs, recipe.weight_decay, recipe.momentum, size.pictures.image_size) == (90, 1e-4, 0.9, 224)
    assert (size.network.layers, size.network.channels) == ((3, 4, 23, 3), (64, 128, 256, 512))
    first = replace(size.network, layers=(1, 1, 1, 1), channels=(4, 4, 4, 4)).build(num_classes=1000).conv1
    assert (first.kernel_size, first.stride) == ((7, 7), (2, 2))  # type: ignore[union-attr]


def test_the_small_table_trains_first_what_its_claim_needs() -> None:
    size = small()
    runs = [(run.setting.name, run.seed) for run in size.runs(num_seeds=3)]
    assert runs[:4] == [(n, 0) for n in ("dataparallel-256", "pipeline-256", "dataparallel-1k", "pipeline-1k")]
    assert [name for name, _ in runs[12:13]] == ["pipeline-1k, 8 stages"]
    assert {name for name, _ in runs[13:15]} == {"dataparallel-4k", "pipeline-4k"}
    assert {name for name, _ in runs[15:]} == {"dataparallel-256, 4 replicas"}
    assert len(runs) == len(set(runs)) == 12 + 1 + 2 + 2
    more = {(run.setting.name, run.seed) for run in size.runs(num_seeds=4)} - set(runs)
    assert more == {("dataparallel-1k", 3), ("pipeline-1k", 3)}
    batch = {setting.name: setting.batch_size for setting in size.settings}
    assert all(batch[name] == batch[other] for name, other in PAIRS.items())
    assert all(setting.rows * setting.num_microbatches == setting.batch_size for setting in size.settings)
    by_name = {setting.name: setting for setting in size.settings}
    four, cut = by_name["dataparallel-256, 4 replicas"], by_name["pipeline-256"]
    assert four.batch_size // four.num_devices == cut.rows == 8, "rows to normalise by"


# ---- class folders ---------------------------------------------------------------------------------------------------


def class_folders(folder: Path, *, num_train: int = 6, num_eval: int = 3, classes: str = "ab") -> Path:
    """Pictures of 20 x 30 pixels; a class has its colour."""
    random = np.random.default_rng(0)
    for number, name in enumerate(classes):
        for split, count in (("train", num_train), ("val", num_eval)):
            (folder / split / name).mkdir(parents=True)
            for at in range(count):
                pixels = random.integers(0, 80, (20, 30, 3), dtype=np.uint8)
                pixels[..., number % 3] += 150
                Image.fromarray(pixels).save(folder / split / name / f"{at}.jpg")
    return folder


def test_training_pictures_are_cropped_anew_each_epoch_and_alike_in_every_process(tmp_path: Path) -> None:
    folder = class_folders(tmp_path)
    train_split = FolderPictures(folder / "train", size=16, augmented=True)
    held_out = FolderPictures(folder / "val", size=16, augmented=False)
    ids = torch.tensor([0, 7])
    first = train_split.load(ids, epoch=0)
    assert first.shape == (2, 3, 16, 16) and first.dtype == torch.float32
    assert train_split.labels.tolist() == [0] * 6 + [1] * 6
    assert not torch.equal(first, train_split.load(ids, epoch=1))
    assert torch.equal(held_out.load(ids[:1], epoch=0), held_out.load(ids[:1], epoch=1))
    load = partial(batches, train_split, [ids, ids.flip(0)], epoch=0, device=torch.device("cpu"))
    (inputs, target), (flipped, _) = load(num_workers=2)
    assert torch.equal(inputs, first) and torch.equal(flipped, first.flip(0)) and target.tolist() == [0, 1]


def test_evaluation_sees_the_middle(tmp_path: Path) -> None:
    """As the original: the shorter side is resized to 256 for 224 pixels, and the middle is taken."""
    folder = class_folders(tmp_path, num_train=1, num_eval=1, classes="a")
    picture = np.zeros((64, 128, 3), dtype=np.uint8)
    picture[:, :20] = picture[:, -20:] = picture[:3] = picture[-3:] = 255  # beyond the middle 56 x 56
    Image.fromarray(picture).save(folder / "val" / "a" / "0.png")
    (folder / "val" / "a" / "0.jpg").unlink()
    pixels = FolderPictures(folder / "val", size=56, augmented=False).load(torch.tensor([0]), epoch=0)
    black = torch.tensor([-0.485 / 0.229, -0.456 / 0.224, -0.406 / 0.225]).view(1, 3, 1, 1)
    torch.testing.assert_close(pixels, black.expand(1, 3, 56, 56))


# ---- two methods -----------------------------------------------------------------------------------------------------


def run_of(setting: Setting, pictures: PictureSet, *, epochs: int = 2, seed: int = 0) -> Run:
    recipe = Recipe(epochs=epochs, base_rate=0.05, base_batch=8, schedule="line")
    return Run(setting, seed, TINY, recipe, pictures)


class RandomPictures:
    """In float64, where another order of sums is far below any mistake."""

    def __init__(self, count: int) -> None:
        self.labels = torch.arange(count) % 3

    def load(self, ids: Tensor, *, epoch: int) -> Tensor:
        draws = [np.random.default_rng((epoch, int(sample))).random((3, 32, 32)) for sample in ids]
        return torch.from_numpy(np.stack(draws))


@contextmanager
def in_double() -> Iterator[None]:
    """Random pictures, and a pipeline that is cut in the middle, which takes no measurement."""
    load, cut = training.load_pictures, GraphBench._cut
    GraphBench._cut = lambda bench, setting: (len(bench._graph(setting.rows).units) // 2,)  # type: ignore[method-assign]
    training.load_pictures = lambda folder, there: {  # type: ignore[assignment]
        "train": RandomPictures(there.num_train),
        "eval": RandomPictures(there.num_eval),
    }
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        training.load_pictures = load
        GraphBench._cut = cut  # type: ignore[method-assign]
        torch.set_default_dtype(torch.float32)


RANDOM = PictureSet("CIFAR-100", 3, 25, 11, 32)


def trained_both_ways(world: World, folder: str) -> tuple[float, float, float]:
    """Errors of 2 replicas and of 2 micro-batches, and the largest difference between their weights."""
    with in_double():
        replicas = Training(world, Job(run_of(REPLICAS, RANDOM), folder, f"{folder}/replicas"))
        stages = Training(world, Job(run_of(STAGES, RANDOM), folder, f"{folder}/stages"))
        first, second = replicas.finish(), stages.finish()
        theirs = dict(replicas.bench.model.named_parameters())
        mine = [(name, p) for part in stages._method.parts() for name, p in part.named_parameters()]
        assert 0 < len(mine) < len(theirs)
        difference = max(float((p - theirs[name]).detach().abs().max() / p.detach().abs().max()) for name, p in mine)
        return first.error, second.error, difference


def test_two_micro_batches_train_the_weights_of_two_replicas(ranks: RankPool, tmp_path: Path) -> None:
    """Both normalise by the same halves of the batch, and the gradient is the mean of both."""
    for first, second, difference in ranks.run(2, trained_both_ways, str(tmp_path)):
        assert 0 <= first <= 100 and 0 <= second <= 100
        assert difference < 1e-9


def right_of(world: World, setting: Setting, folder: str) -> tuple[float, int]:
    """The error that a run tells, and the samples that its model, put together again, gets right one by one."""
    with in_double():
        run = Training(world, Job(run_of(setting, RANDOM), folder, f"{folder}/counted"))
        error = run.finish().error
        run._checkpoints.restore(optimizer=run._optimizer)
        model, split = run.bench.model.eval(), RandomPictures(RANDOM.num_eval)
        ids = torch.arange(RANDOM.num_eval)
        return error, int((model(split.load(ids, epoch=0)).argmax(1) == split.labels).sum())


@pytest.mark.parametrize("setting", [REPLICAS, STAGES], ids=lambda setting: setting.name)
def test_the_error_is_that_of_all_samples_once(setting: Setting, ranks: RankPool, tmp_path: Path) -> None:
    """Eleven samples are no whole number of batches."""
    for error, right in ranks.run(2, right_of, setting, str(tmp_path)):
        assert error == pytest.approx(100 * (1 - right / 11))


class Killed(Exception):
    pass


def stopped_and_gone_on(world: World, setting: Setting, folder: str) -> tuple[bool, int]:
    """Whether a run that is killed in its third epoch ends with the weights of one that is not, and the number of
    epochs that it trains again."""
    with in_double():
        whole = Training(world, Job(run_of(setting, RANDOM, epochs=4), folder, f"{folder}/whole"))
        job = Job(run_of(setting, RANDOM, epochs=4), folder, f"{folder}/stopped")
        losses = whole.finish().losses
        killed = Training(world, job)
        train_epoch, epochs = killed._epoch, list[int]()

        def until_third(epoch: int) -> float:
            if epoch == 2:
                raise Killed
            return train_epoch(epoch)

        killed._epoch = until_third  # type: ignore[method-assign]
        with pytest.raises(Killed):
            killed.finish()
        again = Training(world, job)
        go_on = again._epoch
        again._epoch = lambda epoch: (epochs.append(epoch), go_on(epoch))[1]  # type: ignore[method-assign]
        outcome = again.finish()
        assert outcome.losses == losses
        held = whole.bench.model.state_dict()
        mine = [(name, t) for part in again._method.parts() for name, t in part.state_dict().items()]
        return all(torch.equal(tensor, held[name]) for name, tensor in mine), len(epochs)


@pytest.mark.parametrize("setting", [REPLICAS, STAGES], ids=lambda setting: setting.name)
def test_a_stopped_run_goes_on_behind_its_last_epoch(setting: Setting, ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, stopped_and_gone_on, setting, str(tmp_path)) == [(True, 2)] * 2
    assert len(list((tmp_path / "stopped").iterdir())) == 4  # of two ranks, the two newest epochs


def test_an_epoch_that_one_rank_has_not_kept_does_not_count(tmp_path: Path) -> None:
    from benchmarks.resnet101_accuracy.checkpoints import _newest

    for name in ("epoch-1.rank-0.pt", "epoch-1.rank-1.pt", "epoch-2.rank-0.pt", "epoch-2.rank-1.part"):
        (tmp_path / name).touch()
    assert _newest(tmp_path, num_ranks=2) == 1
    assert _newest(tmp_path / "none", num_ranks=2) == 0


def trained_on_folders(world: World, folder: str, there: PictureSet) -> Outcome:
    return train(world, Job(run_of(STAGES, there, epochs=1), folder, f"{folder}/checkpoints"))


@pytest.mark.full
def test_class_folders_are_trained(ranks: RankPool, tmp_path: Path) -> None:
    there = find_pictures(class_folders(tmp_path), image_size=32)
    assert there == PictureSet("class folders", 2, 12, 6, 32)
    first, second = ranks.run(2, trained_on_folders, str(tmp_path), there)
    assert first.error == second.error and 0 <= first.error <= 100
    assert len(first.losses) == 1 and 0 < first.losses[0] < 10 * math.log(2)


# ---- runs that are kept ----------------------------------------------------------------------------------------------

TRAINING = "benchmarks/resnet101_accuracy/training.py"
OUTCOME = Outcome(59.5, 12.0, (4.0, 3.0))


class CountingRanks:
    """In the place of ranks: counts the runs, and fails where it is told to."""

    def __init__(self, *, fails_at: int | None = None) -> None:
        self.jobs: list[tuple[Run, int]] = []
        self._fails_at = fails_at

    @contextmanager
    def ready(self, *, timeout_seconds: float) -> Iterator[CountingRanks]:
        yield self

    def run(self, function: Callable[..., Outcome], job: Job, *, num_ranks: int) -> list[Outcome]:
        assert function is train
        if len(self.jobs) == self._fails_at:
            raise Killed
        self.jobs.append((job.run, num_ranks))
        Path(job.checkpoints).mkdir(parents=True)
        return [replace(OUTCOME, error=60.0 + len(self.jobs))] * num_ranks


def completed(monkeypatch: pytest.MonkeyPatch, folder: Path, runs: list[Run], **how: int) -> list[tuple[Run, int]]:
    ranks = CountingRanks(**how)
    monkeypatch.setattr(script, "FreshRanks", ranks)
    with suppress(Killed):
        script.complete(runs, KeptRuns(folder), data=folder, checkpoints=folder / "checkpoints")
    return ranks.jobs


def test_the_command_run_again_does_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_rows, "environment", lambda: {"commit": "abc"})
    runs = list(small().runs(num_seeds=1))
    done = partial(completed, monkeypatch, tmp_path)
    assert [run for run, _ in done(runs, fails_at=3)] == runs[:3]
    rest = done(runs)
    assert [run for run, _ in rest] == runs[3:]
    assert all(num_ranks == run.setting.num_devices for run, num_ranks in rest)
    assert done(runs) == []
    assert list((tmp_path / "checkpoints").iterdir()) == []  # an ended run needs none
    rows = json.loads((tmp_path / FILE).read_text())["rows"]
    assert len(rows) == len(runs) == len((tmp_path / FILE).read_text().splitlines()) - 5
    assert rows[0]["settings"]["setting"]["batch_size"] == 32 and rows[0]["environment"] == {"commit": "abc"}
    assert KeptRuns(tmp_path).error(runs[0]) == 61.0


def test_other_settings_and_other_code_make_a_run_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, other = list(small().runs(num_seeds=1))[:2]
    kept = KeptRuns(tmp_path)
    kept.keep(run, OUTCOME)
    kept.keep(other, OUTCOME)
    longer = replace(run, recipe=replace(run.recipe, epochs=9))
    changed = [longer, replace(run, seed=1), replace(run, network=replace(run.network, stride=1)), other]
    assert [kept.error(each) for each in changed] == [None, None, None, 59.5]
    kept.keep(longer, replace(OUTCOME, error=50.0))
    assert (kept.error(run), kept.error(longer), kept.error(other)) == (None, 50.0, 59.5)  # in its place
    texts = dict(kept_rows.sources(CODE))
    assert TRAINING in texts and not any(name.endswith("report.py") for name in texts)
    assert "pipetransformer/graphs/graph/pipeline.py" in texts
    monkeypatch.setattr(kept_rows, "sources", lambda code: {**texts, TRAINING: texts[TRAINING] + "\nx = 1\n"})
    assert KeptRuns(tmp_path).error(other) is None
    monkeypatch.setattr(kept_rows, "sources", lambda code: {**texts, TRAINING: texts[TRAINING] + "\n# x = 1\n"})
    assert KeptRuns(tmp_path).error(other) == 59.5, "a comment measures nothing"
    monkeypatch.undo()
    assert key_of(other) == key_of(replace(other)) and KeptRuns(tmp_path).error(other) == 59.5


@pytest.mark.parametrize("text", ["[", '{"rows": [{"key": 1}]}', "[1]", "{}", "[\xe4]"])
def test_a_file_that_holds_no_runs_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match="does not hold runs; delete it"):
        KeptRuns(tmp_path)


@pytest.mark.full
def test_the_whole_command_trains_class_folders(tmp_path: Path) -> None:
    """On ranks of its own, from a checkpoint that another command left."""
    there = find_pictures(class_folders(tmp_path / "data"), image_size=32)
    size = Size(
        "tiny", TINY, Recipe(epochs=2, base_batch=8), there, ((Experiment(REPLICAS), Experiment(STAGES)),), ("x",)
    )
    runs = list(size.runs(num_seeds=1))
    kept = KeptRuns(tmp_path)
    script.complete(runs, kept, data=tmp_path / "data", checkpoints=tmp_path / "checkpoints")
    assert all(0 <= (kept.error(run) or 0) <= 100 for run in runs)
    assert [len(row["losses"]) for row in json.loads((tmp_path / FILE).read_text())["rows"]] == [2, 2]


# ---- the table -------------------------------------------------------------------------------------------------------


def test_within_noise_is_what_welchs_test_says() -> None:
    random = np.random.default_rng(0)
    told = []
    for _ in range(200):
        mine, others = random.normal(0, 1, 3).tolist(), random.normal(random.choice([0, 4]), 2, 4).tolist()
        compared = compare(mine, others)
        assert compared is not None
        assert compared.is_noise == (ttest_ind(mine, others, equal_var=False).pvalue >= 0.05)
        told.append(compared.is_noise)
    assert 20 < sum(told) < 180
    assert compare([1.0], [1.0, 2.0]) is None
    same = compare([1.0, 1.0], [1.0, 1.0])
    assert same is not None and same.is_noise


def test_a_row_outside_noise_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    errors = {
        "dataparallel-256": [80.0, 80.5, 81.0],
        "dataparallel-4k": [80.0, 80.5, 81.0],
        "pipeline-256": [80.2, 80.6, 80.7],
        "pipeline-4k": [90.0, 91, 90.5],
    }
    tell(errors, small(), world_size=2, folder=tmp_path)
    kept = json.loads((tmp_path / "resnet101-accuracy.json").read_text())
    told = capsys.readouterr().out
    assert "Not within noise: pipeline-4k." in kept["notes"] and "Not within noise: pipeline-4k." in told
    assert "needs 8 ranks" in told
    rows = {row["experiment"]: row for row in kept["rows"]}
    assert [rows[name]["within noise"] for name in PAIRS] == ["yes", None, None, "no", None]


def test_a_row_of_one_seed_is_told_without_a_test() -> None:
    errors = {"dataparallel-1k": [50.0, 51.0, 52.0], "pipeline-1k, 8 stages": [51.0]}
    rows = {row["experiment"]: row for row in rows_of(errors, small(), world_size=8)}
    row = rows["pipeline-1k, 8 stages"]
    assert (row["devices"], row["seeds"], row["top-1 error %"], row["±"], row["noise"]) == (8, 1, 51.0, None, None)


# ---- mistakes --------------------------------------------------------------------------------------------------------


def without(folder: Path, name: str) -> Path:
    shutil.rmtree(folder / name)
    return folder


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda folder: folder / "nowhere", "is no folder; give one with class folders (train/CLASS, val/CLASS) or "),
        (lambda folder: folder, "holds no pictures that are known; give one with class folders"),
        (lambda folder: without(class_folders(folder), "val"), "val holds no class folders with pictures ("),
        (lambda folder: without(class_folders(folder), "val/a"), "class a is in one of "),
        (lambda folder: class_folders(folder, num_eval=0), "val holds no class folders with pictures ("),
        (class_folders, "has 12 pictures to train; give a batch's 4096"),
    ],
)
def test_a_folder_that_cannot_be_trained_is_one_line(
    make: Callable[[Path], Path],
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(sys, "argv", ["script", "--data", str(make(tmp_path)), "--output", str(tmp_path / "out")])
    assert run_guarded(script.main) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("error: --data: ") and line in told


@pytest.mark.parametrize(
    ("arguments", "line"),
    [([], "--data: no folder is given; give one with"), (["--seeds", "no"], "argument --seeds: no is not allowed")],
)
def test_a_mistake_is_one_line(
    arguments: list[str], line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["script", *arguments])
    assert run_guarded(script.main) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("error: ") and line in told
