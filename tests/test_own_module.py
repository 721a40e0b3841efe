"""``pipetransformer.train`` of any module with a list of blocks is a plain loop over it; ``Run`` reads what is left."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from own_module import Mine, samples
from ranks import RankPool
from test_launch import ROOT
from torch import Tensor, nn

import pipetransformer
from pipetransformer.config.datasets import DATASETS
from pipetransformer.data import epoch_batches
from pipetransformer.errors import UserError
from pipetransformer.launch.python import _settings
from pipetransformer.models.traced import traced_family
from pipetransformer.process.world import World
from pipetransformer.run import events

TRAIN = {"epochs": 3, "batch_size": 12, "lr": 0.01, "lr_schedule": "constant", "precision": "float64"}
FROZEN = 2
SETTINGS: dict[str, Any] = {
    "train": TRAIN,
    "freeze": {"policy": "static", "max_frozen": FROZEN, "warmup": "1 epoch", "guard": False},
    "pipe": {"measure": False},
    "run": {"id": "x"},
}
Weights = dict[str, np.ndarray]


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """The registry of datasets, behind a test."""
    yield
    DATASETS.pop("own", None)


def ours(world: World, folder: str) -> tuple[Weights, list[int]]:
    """Weights behind an elastic run, of every rank; and the frozen blocks of each step."""
    torch.manual_seed(3)
    model, frozen = Mine(), list[int]()

    def hear(event: events.Event) -> None:
        if isinstance(event, events.Stepped):
            frozen.append(event.plan.frozen)

    settings = {**SETTINGS, "run": {"id": f"x{world.size}", "dir": folder}, "log": {"report": False}}
    run = pipetransformer.train(
        *(model, samples(50, seed=0), samples(20, seed=1), settings),
        blocks="tower",
        callbacks=[hear],
        world=world,
    )
    assert run.summary["world_size"] == world.size
    run.model(model, which="final")
    return {name: value.detach().double().numpy() for name, value in model.state_dict().items()}, frozen


def plain() -> Weights:
    """As one writes it without us."""
    torch.manual_seed(3)
    model, data = Mine().double(), samples(50, seed=0)
    groups = [{"params": [p], "weight_decay": 0.01 if p.ndim > 1 else 0.0} for p in model.parameters()]
    optimizer = torch.optim.AdamW(groups, lr=TRAIN["lr"])
    for epoch in range(3):
        if epoch == 1:
            for part in (model.start, *model.tower[:FROZEN]):
                part.requires_grad_(False)
            model.shift.requires_grad_(False)
        for batch in epoch_batches(np.ones(50, dtype=np.int64), batch_size=12, seed=0, epoch=epoch, num_nodes=1):
            x = torch.stack([data[number][0] for number in batch.ids]).double()
            labels = torch.tensor([data[number][1] for number in batch.ids])
            optimizer.zero_grad()
            (nn.functional.cross_entropy(model(x), labels, reduction="sum") / 12).backward()
            optimizer.step()
    return {name: value.detach().numpy() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("size", [1, 2])
def test_a_module_of_ones_own_trains_as_the_plain_loop(size: int, ranks: RankPool, tmp_path: Path) -> None:
    """Frozen, cached, on one rank and on two. Saved weights are float32."""
    expected = plain()
    for weights, frozen in ranks.run(size, ours, str(tmp_path)):
        assert set(weights) == set(expected)
        for name, value in expected.items():
            assert np.allclose(weights[name], value, rtol=1e-6, atol=1e-7), name
        assert frozen[:5] == [0] * 5 and set(frozen[5:]) == {FROZEN}


def test_a_run_is_read_as_tables_and_its_weights_are_in_the_module(tmp_path: Path) -> None:
    model = Mine()
    settings = {**SETTINGS, "train": {**TRAIN, "precision": "float32"}, "run": {"id": "x", "dir": str(tmp_path)}}
    data = samples(50, seed=0), samples(40, seed=1)
    run = pipetransformer.train(model, *data, settings, blocks="tower")
    x, labels = torch.stack([x for x, _ in data[1]]), np.array([label for _, label in data[1]])
    with torch.no_grad():
        right = (model.eval()(x).argmax(dim=1).numpy() == labels).mean()
    assert right == pytest.approx(run.best_metrics["accuracy"]) and right > 0.8
    again = pipetransformer.Run(tmp_path / "x")
    assert again.metrics == run.metrics and "accuracy" in repr(again)
    assert list(again.freezes["frozen"]) == [0, FROZEN] and list(again.evaluations["step"]) == [5, 10, 15]
    assert (tmp_path / "x" / "report.html").is_file()
    assert not torch.equal(Mine().out.weight, model.out.weight)
    assert torch.equal(again.model(Mine()).out.weight, model.out.weight)
    with pytest.raises(UserError, match="is of another module than Mine"):
        again.model(Mine(depth=3))
    with pytest.raises(UserError, match="it is a module of your own|its configuration cannot be read"):
        again.predict(["a film"])


@pytest.mark.parametrize("pretrained", [False, True])
def test_a_module_may_come_with_trained_weights(pretrained: bool) -> None:
    model = {"pretrained": True} if pretrained else {}
    assert _settings({"model": model}, name="Mine").model.pretrained == pretrained


def test_loss_metrics_and_collate_are_ones_own(tmp_path: Path) -> None:
    """A regression with a loss of absolute values, on inputs by name."""

    class Two(Mine):
        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            x = self.start(left + right) + self.shift
            for block in self.tower:
                x = block(x)
            return self.out(self.norm(x).mean(dim=1))

    def items(number: int, seed: int) -> list[tuple[Tensor, float]]:
        return [(x, float(x.mean())) for x, _ in samples(number, seed=seed)]

    def collate(given: list[Tensor]) -> dict[str, Tensor]:
        x = torch.stack(given)
        return {"left": 0.25 * x, "right": 0.75 * x}

    seen = list[int]()

    def absolute(outputs: Tensor, labels: Tensor) -> Tensor:
        seen.append(len(labels))
        return (outputs[:, 0] - labels).abs()

    metrics = {"less_error": lambda told, labels: -float(np.abs(told - labels).mean())}
    settings = {**SETTINGS, "train": {**TRAIN, "epochs": 8}, "run": {"id": "y", "dir": str(tmp_path)}}
    run = pipetransformer.train(
        *(Two(classes=1), items(50, 0), items(30, 1), settings),
        **{"blocks": "tower", "loss": absolute, "metrics": metrics, "collate": collate},
    )
    errors = run.evaluations["less_error"]
    assert errors.max() > errors[0] and set(run.metrics) == {"less_error", "loss"} and seen
    assert run.metrics["loss"] == pytest.approx(-run.metrics["less_error"], rel=1e-6)


def test_sections_are_merged_with_what_python_gives() -> None:
    found = _settings({"model": {"dtype": "bfloat16"}, "data": {"num_workers": 2}, "cache": None}, name="Mine")
    assert (found.model.dtype, found.model.name, found.data.num_workers) == ("bfloat16", "Mine", 2)
    assert found.cache.disk_budget is None and found.log.wandb == "disabled"


class Tied(Mine):
    def forward(self, features: Tensor) -> Tensor:
        x = self.start(features)
        for block in self.tower:
            x = block(x)
        return self.out(self.norm(x) + self.start(features))


class Branching(Mine):
    def forward(self, features: Tensor) -> Tensor:
        return super().forward(features if features.sum() > 0 else -features)


class Asking(Mine):
    def forward(self, features: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(features, 0.1, self.training))


class Skipping(Mine):
    def forward(self, features: Tensor) -> Tensor:
        x = first = self.start(features)
        for block in self.tower:
            x = block(x) + first
        return self.out(x)


@pytest.mark.parametrize(
    ("model", "blocks", "line"),
    [
        (Mine(), "towers", "blocks: Mine has no towers; its lists of modules are tower"),
        (Mine(depth=1), "tower", "blocks: tower of Mine holds 1 modules; give a list of at least 2 blocks"),
        (
            Tied(),
            "tower",
            "blocks: Tied is no chain of a stem, blocks and a head: what follows the blocks reads",
        ),
        (Branching(), "tower", "blocks: the forward of Branching cannot be traced (TraceError: "),
        (Asking(), "tower", "blocks: the forward of Asking asks whether it trains; leave that to modules such as nn"),
        (
            Skipping(),
            "tower",
            "blocks: Skipping is no chain of a stem, blocks and a head: tower.1 takes more",
        ),
    ],
)
def test_what_is_no_chain_is_told(model: nn.Module, blocks: str, line: str) -> None:
    with pytest.raises(UserError) as caught:
        traced_family(model, blocks, name=type(model).__name__)
    assert str(caught.value).startswith(line)


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ([], "train_dataset: give a dataset with a length, of at least one (input, label) pair"),
        (
            [(torch.zeros(6), [0.0, 1.0])] * 9,
            "train_dataset: a label has 1 dimensions; give a class or",
        ),
        ([1, 2, 3], "train_dataset: its items are no (input, label) pairs"),
    ],
)
def test_bad_data_are_told(data: list[Any], line: str, tmp_path: Path) -> None:
    settings = {**SETTINGS, "run": {"id": "z", "dir": str(tmp_path)}}
    for _ in range(2):  # a mistake leaves the process as it was
        with pytest.raises(UserError) as caught:
            pipetransformer.train(Mine(), data, samples(9, seed=1), settings, blocks="tower")
        assert str(caught.value).startswith(line)
    assert not list(tmp_path.iterdir())


class Flat(Mine):
    def forward(self, features: Tensor) -> Tensor:
        x = self.start(features.mean(dim=1))
        for block in self.tower:
            x = block(x)
        return self.out(x)


def test_blocks_without_positions_are_told(tmp_path: Path) -> None:
    settings = {**SETTINGS, "run": {"id": "f", "dir": str(tmp_path)}}
    with pytest.raises(UserError) as caught:
        pipetransformer.train(Flat(), samples(20, seed=0), samples(9, seed=1), settings, blocks="tower")
    assert str(caught.value).startswith("model.blocks: [rows, 8] goes into block 1 of Flat; those that freeze need")


class Narrowing(Mine):
    """Its second block leaves half of the width."""

    def __init__(self) -> None:
        super().__init__()
        self.tower[1] = nn.Linear(8, 4)
        self.tower[2], self.tower[3] = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm, self.out = nn.LayerNorm(4), nn.Linear(4, 3)


def test_blocks_of_several_widths_freeze_no_part(tmp_path: Path) -> None:
    settings: dict[str, Any] = {**SETTINGS, "run": {"id": "w", "dir": str(tmp_path)}}
    with pytest.raises(UserError, match=r"behind block 2 of Narrowing; .* of one width; give freeze.policy=none"):
        pipetransformer.train(Narrowing(), samples(20, seed=0), samples(9, seed=1), settings, blocks="tower")
    settings["freeze"] = {"policy": "none"}
    pipetransformer.train(Narrowing(), samples(20, seed=0), samples(9, seed=1), settings, blocks="tower")


def test_the_example_of_the_documentation_runs(tmp_path: Path) -> None:
    """In a process of its own, as somebody would: with a script and no clone in sight."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL)
    assert len(code.splitlines()) <= 64
    (tmp_path / "mine.py").write_text(code)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "mine.py"]
    ended = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "step 40: 3 blocks are frozen" in ended.stdout and "tensor([" in ended.stdout
    accuracy = float(re.search(r"accuracy (\S+), loss \S+\)", ended.stdout)[1])  # type: ignore[index]
    assert accuracy > 0.5


def test_the_package_is_light_until_it_is_asked() -> None:
    code = "import sys, pipetransformer; print(sorted(pipetransformer.__all__), 'torch' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT).stdout
    assert told == "['Run', 'events', 'train'] False\n"
    with pytest.raises(AttributeError, match="has no attribute 'tarin'"):
        _ = pipetransformer.tarin


def test_a_file_cannot_name_a_module_of_ones_own(tmp_path: Path) -> None:
    from test_when_to_end import run

    ended = run(tmp_path, "task=own", "data.name=own")
    assert ended.cause.startswith('rank 0: data.name: "own" is not allowed; give one of digits, ')
