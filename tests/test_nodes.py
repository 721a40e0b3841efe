"""Several launches form one job: equal to the plain loop, cached on every node, and whatever is wrong is named."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from laws import (
    STATIC,
    Case,
    configuration,
    configuration_file,
    deviation,
    final_weights,
    gradient_deviation,
    reference,
    write_replay,
)
from ranks import RankPool
from safetensors.numpy import load_file
from test_bad_input import IMAGES
from test_launch import ROOT
from tiny import tiny_bert, tiny_squad, tiny_sst2, tiny_text_model
from torch.distributed import TCPStore

from pipetransformer.config import Config
from pipetransformer.errors import UserError
from pipetransformer.launch.node import free_port
from pipetransformer.process.world import World
from pipetransformer.run.folder import RunFolder, is_shared
from pipetransformer.trainer import Trainer

MOVES = ((0, 0, 2), (5, 2, 1), (10, 4, 2), (15, 1, 1))


def node_run(world: World, case: Case, data: str, folder: str, num_nodes: int) -> tuple[object, object, int, int]:
    """The job on one rank of ``num_nodes`` nodes that this host plays: (weights, gradients, cache hits, misses)."""
    local_size = world.size // num_nodes
    world = replace(world, local_rank=world.rank % local_size, local_size=local_size)
    replay = Path(folder) / f"replay_{world.rank}.jsonl"
    write_replay(replay, case.plans())
    gradients: dict[int, dict[str, np.ndarray]] = {}

    def probe(step: int, named: object) -> None:
        if step in (0, trainer.calendar.total_steps - 1):
            gradients[0 if step == 0 else -1] = {name: g.detach().numpy().copy() for name, g in named.items()}

    overrides = [*case.overrides(data), f"run.replay={replay}", f"run.dir={folder}", "run.id=x", "run.overwrite=true"]
    trainer = Trainer(configuration(case.model, overrides), world, probe=probe, timed=False)
    trainer.run()
    totals = trainer.report.totals
    return final_weights(trainer), gradients, totals.hits, totals.misses


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("texts")
    tiny_bert(folder / "bert", layers=6)
    tiny_text_model(folder / "bert-qa", "Bert-qa")
    tiny_sst2(folder / "sst2", 150, num_eval_samples=40)
    tiny_squad(folder / "squad", 120, num_eval_questions=20)
    return str(folder)


@pytest.mark.parametrize("model", ["vit", "bert"])
@pytest.mark.parametrize("num_nodes", [2, 4])
def test_nodes_train_as_the_plain_loop_and_read_their_own_samples(
    model: str, num_nodes: int, ranks: RankPool, texts: str, tmp_path: Path
) -> None:
    moves = MOVES if num_nodes == 2 else tuple((step, frozen, 1) for step, frozen, _ in MOVES)
    case = Case(model, 4, moves, 2, cached=True)
    weights, gradients = reference(case, texts, num_nodes=num_nodes)
    answers = ranks.run(4, node_run, case, texts, str(tmp_path), num_nodes)
    assert gradient_deviation([answer[1] for answer in answers], gradients) < 1e-10
    assert deviation(answers[0][0], weights) < 1e-10
    # Copies that a replica computes, whose node has nothing left in a short batch, count neither as hit nor as miss.
    assert answers[0][2] > 0 and answers[0][3] == 0


# ---- launches ----------------------------------------------------------------------------------------------------

ELASTIC = ("train.epochs=4", "freeze.policy=schedule", "freeze.alpha=0.5")


def launched(config: Path, port: int, nodes: Sequence[Sequence[object]], *overrides: str) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of one launch for each (NPROC, NNODES, NODE_RANK, RUN_ID, ...) of ``nodes``."""
    started = []
    for nproc, nnodes, rank, run_id, *own in nodes:
        if started and rank == 0:
            time.sleep(10)  # the others wait for it by now, all of them
        command = [sys.executable, "-m", "pipetransformer.launch", str(nproc), str(nnodes), str(rank), "127.0.0.1"]
        started.append(
            subprocess.Popen(
                [*command, str(port), str(config), run_id, *ELASTIC, *overrides, *own],
                cwd=ROOT,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
    ended = [process.communicate(timeout=240) for process in started]
    return [(process.returncode, *texts) for process, texts in zip(started, ended)]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(IMAGES.replace("FOLDER", str(tmp_path)))
    return path


@pytest.mark.full
@pytest.mark.parametrize("num_nodes", [2, 3])
def test_launches_form_one_job_that_node_0_names(config: Path, num_nodes: int) -> None:
    nodes = [(1, num_nodes, rank, f"name{rank}") for rank in range(num_nodes)]
    ended = launched(config, free_port(), nodes)
    assert [code for code, _, _ in ended] == [0] * num_nodes, ended
    assert [path.name for path in (config.parent / "runs").iterdir()] == ["name0"]
    summary = json.loads((config.parent / "runs" / "name0" / "summary.json").read_text())
    assert summary["world_size"] == num_nodes
    assert [move["frozen"] for move in summary["transitions"]] == [2, 3, 4]
    assert "run name0" in ended[0][1] and "run name0" not in ended[1][1]


@pytest.mark.parametrize(
    ("model", "num_nodes", "num_ranks"),
    [
        ("bert", 2, 2),
        pytest.param("vit", 2, 2, marks=pytest.mark.full),
        pytest.param("bert-qa", 2, 2, marks=pytest.mark.full),
        pytest.param("bert", 3, 1, marks=pytest.mark.full),
    ],
)
def test_launches_train_as_the_plain_loop(
    model: str, num_nodes: int, num_ranks: int, texts: str, tmp_path: Path
) -> None:
    moves = tuple((step, frozen, min(pp, num_ranks)) for step, frozen, pp in MOVES)
    case = Case(model, num_nodes * num_ranks, moves, 2, cached=True)
    weights, _ = reference(case, texts, num_nodes=num_nodes)
    write_replay(tmp_path / "replay.jsonl", case.plans())
    places = (f"run.replay={tmp_path / 'replay.jsonl'}", f"run.dir={tmp_path}", "run.timeout=60")
    nodes = [(num_ranks, num_nodes, node, f"{node}") for node in range(num_nodes)]
    ended = launched(configuration_file(model), free_port(), nodes, *case.overrides(texts), *places)
    assert [code for code, _, _ in ended] == [0] * num_nodes, ended
    saved = load_file(tmp_path / "0" / "model" / "final" / "model.safetensors")
    assert deviation(saved, weights) < 1e-10
    cache = json.loads((tmp_path / "0" / "summary.json").read_text())["cache"]
    assert cache["hits"] > 0 and cache["misses"] == 0


@pytest.mark.parametrize(
    ("nodes", "line"),
    [
        pytest.param(
            [(1, 3, 0, "a", "run.timeout=12"), (1, 3, 2, "b", "run.timeout=12")],
            "NNODES: node 1 of 3 did not come within run.timeout (12 s); start it, or",
            marks=pytest.mark.full,
        ),
        pytest.param(
            [(1, 2, 1, "b"), (1, 2, 1, "c"), (1, 2, 0, "a")],
            "NODE_RANK: two nodes say that they are node 1; number",
            marks=pytest.mark.full,
        ),
        ([(1, 2, 0, "a"), (1, 3, 1, "b")], "NNODES: node 1 says 3 and node 0 2; give all the same"),
        pytest.param(
            [(1, 2, 0, "a"), (2, 2, 1, "b")],
            "NPROC: node 1 says 2 and node 0 1; give all the same",
            marks=pytest.mark.full,
        ),
        ([(1, 2, 0, "a"), (1, 2, 1, "b", "train.lr=0.5")], "train.lr: node 1 says 0.5 and node 0 0.001; give all the"),
    ],
)
def test_nodes_that_do_not_agree_are_named_on_all_of_them(
    config: Path, nodes: list[tuple[int, int, int, str]], line: str
) -> None:
    ended = launched(config, free_port(), nodes, "run.timeout=20")
    assert all(code != 0 for code, _, _ in ended)
    told = [err.strip().splitlines()[-1] for _, _, err in ended]
    assert all(text.startswith("error: ") and line in text for text in told), told
    assert not (config.parent / "runs").exists()


@pytest.mark.full
def test_a_node_that_nobody_counts_on_is_told_and_the_others_train(config: Path) -> None:
    ended = launched(config, free_port(), [(1, 2, 1, "b"), (1, 3, 2, "c"), (1, 2, 0, "a")])
    assert [code for code, _, _ in ended] == [0, 2, 0], ended
    assert ended[1][2] == "error: NNODES: node 2 says 3 and node 0 2; give all the same\n"
    assert [path.name for path in (config.parent / "runs").iterdir()] == ["a"]
    summary = json.loads((config.parent / "runs" / "a" / "summary.json").read_text())
    assert summary["world_size"] == 2
    assert [move["frozen"] for move in summary["transitions"]] == [2, 3, 4]
    assert "run a" in ended[2][1] and "run a" not in ended[0][1]


@pytest.mark.full
def test_nodes_with_other_files_are_named(tmp_path: Path, texts: str) -> None:
    tiny_sst2(tmp_path / "sst2", 150, num_eval_samples=40, seed=1)
    case = Case("bert", 2, STATIC[1])
    own = (f"data.path={tmp_path / 'sst2'}",)
    nodes = [(1, 2, 0, "a"), (1, 2, 1, "b", *own)]
    ended = launched(configuration_file("bert"), free_port(), nodes, *case.overrides(texts), f"run.dir={tmp_path}")
    assert all(code == 1 for code, _, _ in ended)
    assert all("data.path: node 1 has other train data than node 0; give all the same" in err for _, _, err in ended)


def test_a_port_with_another_store_on_it_is_no_job(config: Path) -> None:
    port = free_port()
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    ((code, _, err),) = launched(config, port, [(1, 2, 1, "b")], "run.timeout=20")
    del store
    assert code == 2
    assert err.startswith(f"error: MASTER_PORT: another job is at 127.0.0.1:{port} already; give another port")


def test_a_node_without_node_0_says_where_it_looked(config: Path) -> None:
    port = free_port()
    ((code, _, err),) = launched(config, port, [(1, 2, 1, "b")], "run.timeout=3")
    assert code == 2
    assert err == f"error: MASTER_ADDR: node 0 did not answer at 127.0.0.1:{port} within run.timeout (3 s)\n"


def apart(world: World, folder: str, resume: bool) -> tuple[object, str]:
    """Two nodes, each with a folder of its own at the place that node 0 names: (interval of checkpoints, the error)."""
    world = replace(world, local_rank=0, local_size=1)
    settings = (f"run.dir={folder}", "run.id=x", "checkpoint.every=1 epoch", "train.epochs=1")
    extra = ("run.resume=true",) if resume else ()
    own = Path(folder) / f"node{world.rank}"

    def found(config: Config, **_: object) -> RunFolder:
        return RunFolder("x", own / "x", (), is_shared=is_shared(own / "x"))

    try:
        with mock.patch("pipetransformer.trainer.find_run_folder", found):
            case = Case("vit", 2, STATIC[1]).overrides("")
            trainer = Trainer(configuration("vit", [*case, *settings, *extra]), world)
            trainer.run()
    except UserError as error:
        return None, str(error)
    return trainer.config.checkpoint.every, ""


@pytest.mark.full
def test_nodes_without_a_shared_folder_train_without_checkpoints_and_cannot_resume(
    ranks: RankPool, tmp_path: Path
) -> None:
    for node in (0, 1):
        (tmp_path / f"node{node}").mkdir()
    assert ranks.run(2, apart, str(tmp_path), False) == [(None, "")] * 2
    left = {path.name for path in (tmp_path / "node0" / "x").iterdir()}
    assert "summary.json" in left and "checkpoints" not in left and not list((tmp_path / "node1").iterdir())
    (tmp_path / "node0" / "x" / "checkpoints" / "step-00000005").mkdir(parents=True)
    for _, error in ranks.run(2, apart, str(tmp_path), True):
        assert error.startswith("run.resume: node 0 alone sees ") and "give a run.dir that all nodes share" in error
    assert (tmp_path / "node0" / "x" / "summary.json").is_file()


def seen(world: World, folder: str) -> tuple[bool, bool]:
    return is_shared(Path(folder) / "runs" / "x"), is_shared(Path(folder) / f"node{world.rank}" / "x")


def test_a_shared_folder_is_known_by_a_file(ranks: RankPool, tmp_path: Path) -> None:
    for node in (0, 1):
        (tmp_path / f"node{node}").mkdir()
    assert ranks.run(2, seen, str(tmp_path)) == [(True, False)] * 2
    assert not list(tmp_path.rglob(".pipetransformer-*"))
