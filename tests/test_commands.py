"""What ``pipetransformer plan`` and ``pipetransformer partition`` answer, and what they refuse."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from pipetransformer.commands import main
from pipetransformer.errors import UserError
from pipetransformer.graphs.analysis.cut import cut_graph
from pipetransformer.graphs.analysis.ftpipe import (
    PartTimes,
    imbalance,
    latencies,
    longest_path,
    topology_imbalance,
)
from pipetransformer.graphs.analysis.parts import time_parts
from pipetransformer.graphs.graph import profile_graph, trace
from pipetransformer.graphs.zoo import zoo_model
from pipetransformer.graphs.zoo.words import wikitext_text
from pipetransformer.pipe.measure.profile_file import Profile, save_profile
from pipetransformer.pipe.planner.costs import Link
from pipetransformer.simulation.analytic import costs_of
from pipetransformer.simulation.schema import load_simulation

REPOSITORY = Path(__file__).resolve().parent.parent
DIGITS = str(REPOSITORY / "config" / "train_config_digits_all_in_one.yaml")
PROFILE = "--profile of a file that is there"
LABELS = (
    "number of cutting edges: ",
    "backward times include recomputation",
    "theoretical times are execution time based on sum of graph weights ms",
    "sequential forward {0: ",
    "parallel backward {0: ",
    "real times are based on real measurements of execution time of generated partitions ms",
    "variance of real execution times ms",
    "avg diviation from the mean of real execution times ms",
    "imbalance is ratio of computation time between fastest and slowest parts between 0 and 1 higher is better",
    "theoretical sequential imbalance:",
    "theoretical parallel imbalance:",
    "real imbalance:",
    "topology aware imbalance is worst imbalance between 2 connected partitions",
    "theoretical sequential topology aware imbalance:",
    "real topology aware imbalance:",
    "communication volumes size of activations of each partition",
    "0: input size: 6.4e-05 MB recieve_time: 0.001064 ms out: ",
    "ideal latency is the time that passes for a forward/backward pass to reach and leave the partition",
    "ideal theoretical latencies ms",
    "ideal real latencies ms",
)


# ---- quantities ------------------------------------------------------------------------------------------------------


def test_quantities_are_those_of_the_original() -> None:
    """Figures that FTPipe printed (AmoebaNet-D, 4 stages): its latencies are sums along its chain of parts."""
    forward = (17.974924278259277, 22.232363510131837, 26.400901756286622, 18.965998039245605)
    backward = (71.50876235961914, 67.00939208984374, 66.21449188232423, 93.31653274536133)
    chain = {(0, 1), (1, 2), (2, 3)}
    assert imbalance(forward) == pytest.approx(0.6808450879515531, rel=1e-12)
    assert topology_imbalance(forward, connected=chain) == pytest.approx(0.7183844784668915, rel=1e-12)
    ideal = latencies(PartTimes(forward, backward), connected=chain)
    assert ideal.forward == pytest.approx((17.974924278259277, 40.20728778839111, 66.60818954467774, 85.57418758392335))
    assert ideal.backward == pytest.approx(
        (298.04917907714844, 226.5404167175293, 159.53102462768555, 93.31653274536133)
    )


def test_latencies_follow_the_graph_and_not_the_order() -> None:
    """Parts 1 and 2 need part 0, part 3 needs both: 1 and 2 do not wait for each other."""
    diamond = {(0, 1), (0, 2), (1, 3), (2, 3)}
    ideal = latencies(PartTimes((1, 2, 4, 8), (1, 2, 4, 8)), connected=diamond)
    assert ideal.forward == (1, 3, 5, 15)
    assert ideal.backward == (15, 10, 12, 8)


def test_the_longest_path_leaves_out_what_runs_beside_it() -> None:
    sources = {1: {0}, 2: {0}, 3: {1, 2}, 4: {3}}
    assert longest_path([1, 2, 4, 8, 100], range(0, 4), sources=sources) == 1 + 4 + 8
    assert longest_path([1, 2, 4, 8, 100], range(1, 4), sources=sources) == 4 + 8  # from outside: nothing to wait for


# ---- partition -------------------------------------------------------------------------------------------------------


def test_depth_counts_levels_as_the_original_does() -> None:
    """At depth 3 GPT-2 may be cut between the halves of its blocks."""
    model = zoo_model("gpt2")
    inputs = (model.example(batch_size=1, seed=0, **model.small_input),)
    blocks, halves = (
        [unit.name for unit in trace(model.build(**model.small), inputs, depth=depth).units] for depth in (2, 3)
    )
    assert blocks[2:6] == [f"transformer.h.{number}" for number in range(4)]
    assert halves[2:6] == [f"transformer.h.0.{part}" for part in ("ln_1", "attn", "ln_2", "mlp")]


@pytest.mark.parametrize("recompute", [True, False])
def test_parts_run_as_the_model(recompute: bool) -> None:
    """Timing leaves weights and running statistics alone, and every part has as many rounds as asked for."""
    model = zoo_model("resnet101")
    torch.manual_seed(0)
    module = model.build(**model.small)
    inputs = (model.example(batch_size=2, seed=0, **model.small_input),)
    graph = trace(module, inputs)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    costs = profile_graph(graph, inputs, repeats=1, recompute=recompute)
    boundaries = cut_graph(costs, num_stages=3, link=Link(0, 0.0), recompute=False)
    forward, backward = time_parts(graph, boundaries, inputs, iterations=2, recompute=recompute)
    assert [len(samples.values) for samples in (*forward, *backward)] == [2] * 6
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())


def test_a_limit_that_holds_nothing_names_the_smallest_that_would() -> None:
    model = zoo_model("gpt2_90m")
    inputs = (model.example(batch_size=1, seed=0, **model.small_input),)
    graph = trace(model.build(**model.small), inputs)
    costs = profile_graph(graph, inputs, repeats=1, recompute=False)
    with pytest.raises(
        UserError, match=r"--memory-limit: 10 bytes hold no cut into 2 parts; give at least \d+\Z"
    ) as told:
        cut_graph(costs, num_stages=2, link=Link(0, 0.0), recompute=False, memory_limit=10)
    least = int(str(told.value).rpartition(" ")[2])
    assert len(cut_graph(costs, num_stages=2, link=Link(0, 0.0), recompute=False, memory_limit=least)) == 1
    with pytest.raises(UserError, match=f"give at least {least}"):
        cut_graph(costs, num_stages=2, link=Link(0, 0.0), recompute=False, memory_limit=least - 1)
    assert cut_graph(costs, num_stages=2, link=Link(0, 0.0), recompute=True, memory_limit=least - 1)
    with pytest.raises(UserError, match=rf"--stages: 999 exceeds the {graph.num_units} units of the model; give at mo"):
        cut_graph(costs, num_stages=999, link=Link(0, 0.0), recompute=False)


@pytest.mark.full
def test_the_command_prints_under_the_originals_labels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipetransformer.commands.partition.measure_link", lambda: Link(1000, 1.0))
    monkeypatch.chdir(tmp_path)
    call = ["partition", "--model", "gpt2_90m", "--size", "8", "--stages", "2", "--iterations", "2", "--output", "auto"]
    assert main(call) == 0
    printed = capsys.readouterr().out
    for label in LABELS:
        assert f"\n{label}" in printed, label
    name = tmp_path / "gpt2_90m_2p_bs1_size8"
    assert name.with_suffix(".txt").read_text() in printed
    assert name.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    figures = json.loads(name.with_suffix(".json").read_text())
    assert figures["num_parameters"] == 89_762_304
    assert len(figures["real"]["forward"]) == len(figures["traffic"]) == 2
    assert f"real imbalance:\nforward {figures['imbalance']['real']['forward']}\n" in printed


def hub(monkeypatch: pytest.MonkeyPatch, folder: Path, rows: list[str] | Exception) -> list[tuple[object, ...]]:
    """Stand in for the hub: a parquet file as it has, or no connection; returns the requests."""
    requests: list[tuple[object, ...]] = []

    def load(*request: object, split: str) -> datasets.Dataset:
        requests.append((*request, split))
        if isinstance(rows, Exception):
            raise rows
        pq.write_table(pa.table({"text": rows}), folder / "train.parquet")
        return datasets.Dataset.from_parquet(str(folder / "train.parquet"), cache_dir=str(folder))

    monkeypatch.setattr(datasets, "load_dataset", load)
    return requests


def test_words_of_wikitext_are_read_from_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    requests = hub(monkeypatch, tmp_path, ["", " = Robert Boulter = \n", "", " Robert is an actor . \n", "more \n"])
    read = wikitext_text("wikitext2", num_words=6)
    assert read.split() == ["=", "Robert", "Boulter", "=", "Robert", "is", "an", "actor", "."]
    assert requests == [("Salesforce/wikitext", "wikitext-2-raw-v1", "train")]


def test_wikitext_that_cannot_be_had_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub(monkeypatch, tmp_path, ConnectionError("no route\nto host"))
    assert main(["partition", "--model", "gpt2", "--dataset", "wikitext2"]) == 2
    assert capsys.readouterr().err == (
        "error: --dataset: wikitext2 is neither in the local cache nor loaded from the hub "
        "(ConnectionError: no route); give its text as --train-data-file\n"
    )


def unexportable(**overrides: object) -> torch.nn.Module:
    class Picks(torch.nn.Module):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return ids[:, : ids.nonzero().shape[0]]

    return Picks()


@pytest.mark.parametrize(
    ("arguments", "changes", "line"),
    [
        (["--stages", "999"], {}, r"--stages: 999 exceeds the \d+ units of the model; give at most \d+"),
        (["--memory-limit", "10"], {}, r"--memory-limit: 10 bytes hold no cut into 4 parts; give at least \d+"),
        (
            [],
            {"build": unexportable},
            r"unexportable model: Picks has aten.nonzero.default, whose result has a shape that depends on values; ",
        ),
        (["--depth", "0"], {}, r"argument --depth: 0 is not allowed; give a whole number of at least 1; usage: .*"),
    ],
)
def test_a_partition_that_cannot_be_is_one_line(
    arguments: list[str],
    changes: dict[str, object],
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = zoo_model("gpt2_90m")
    small: dict[str, Any] = {"build": partial(model.build, **model.small), "size": 16, "vocabulary_size": 61, **changes}
    monkeypatch.setattr("pipetransformer.commands.partition.zoo_model", lambda name: replace(model, **small))
    monkeypatch.setattr("pipetransformer.commands.partition.measure_link", lambda: Link(1000, 1.0))
    assert main(["partition", "--model", "gpt2_90m", "--iterations", "1", *arguments]) == 2
    *before, told = capsys.readouterr().err.splitlines()
    assert re.match(f"error: {line}", told), told
    assert all(re.match(r"costs of \d+ units|at most \d+ cuts", progress) for progress in before), before


def test_a_partition_tells_what_it_does_meanwhile(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = zoo_model("gpt2_90m")
    small = {"build": partial(model.build, **model.small), "size": 16, "vocabulary_size": 61}
    monkeypatch.setattr("pipetransformer.commands.partition.zoo_model", lambda name: replace(model, **small))
    monkeypatch.setattr("pipetransformer.commands.partition.measure_link", lambda: Link(1000, 1.0))
    assert main(["partition", "--model", "gpt2_90m", "--iterations", "2", "--stages", "2"]) == 0
    first, second, third = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"costs of \d+ units", first)
    assert second.startswith("at most 5 cuts run") and third == "2 parts timed, 2 rounds"


# ---- plan ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def profile(tmp_path: Path) -> str:
    """Of a model of 96 blocks on 1,024 ranks that nobody has here."""
    costs = costs_of(load_simulation(REPOSITORY / "config" / "simulation_1024.yaml"))
    path = tmp_path / "profile.json"
    key = {"device": "none", "ranks": 1024, "torch": "0", "precision": "float32"}
    save_profile(Profile(key, costs, dict(costs.by_rows), 1e9), path)
    return str(path)


def test_a_plan_for_every_number_of_frozen_blocks(profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    call = ["plan", DIGITS, "--world-size=1024", "--gpus-per-node=8", f"--profile={profile}", "train.batch_size=4096"]
    assert main(call) == 0
    _, titles, _, *lines = capsys.readouterr().out.splitlines()
    assert [int(line.split()[0]) for line in lines] == list(range(97))
    stop = titles.index("step ms") + len("step ms")
    first, last = (float(line[:stop].split()[-1].replace(",", "")) for line in (lines[0], lines[90]))
    assert 0 < last < first / 5


def test_links_that_nobody_measured_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Costs of one node tell nothing of links between nodes, those of one rank a node nothing of links inside one."""
    costs = costs_of(load_simulation(REPOSITORY / "config" / "simulation_paper_cifar100.yaml"))
    call = ["plan", DIGITS, "train.batch_size=64", "--world-size=32", "--gpus-per-node=8"]
    told = "the link between nodes was not measured"
    for name, between, ranks, nodes in (
        ("two", costs.between, 16, 2),
        ("one", None, 16, 1),
        ("each", costs.between, 16, 16),
    ):
        profile = Profile({"ranks": ranks, "nodes": nodes}, replace(costs, between=between), dict(costs.by_rows), 1e9)
        save_profile(profile, tmp_path / name)
        assert main([*call, f"--profile={tmp_path / name}"]) == (2 if name == "each" else 0)
        printed, refused = capsys.readouterr()
        assert (told in printed) == (name == "one")
        assert ("--gpus-per-node: costs measured with one rank a node tell nothing of links" in refused) == (
            name == "each"
        )


@pytest.mark.full
def test_a_plan_from_costs_measured_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "kept.json"
    assert main(["plan", DIGITS, "model.kwargs.depth=2", "--world-size=2", f"--save-profile={kept}"]) == 0
    first = capsys.readouterr().out
    assert main(["plan", DIGITS, "model.kwargs.depth=2", "--world-size=2", f"--profile={kept}"]) == 0
    assert capsys.readouterr().out == first


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (["plan", DIGITS, "--world-size=8", "--gpus-per-node=3"], "--gpus-per-node: 3 does not divide the 8 ranks"),
        (["plan", DIGITS, "--profile=nowhere.json"], "nowhere.json: cannot be read (No such file or directory)"),
        (
            ["plan", DIGITS, "--world-size=0"],
            "argument --world-size: 0 is not allowed; give a whole number of at least",
        ),
        (["plan", "nowhere.yaml"], "nowhere.yaml"),
        (["plan", DIGITS, "--words", "train.epochs=1"], "--words is not known; usage: pipetransformer plan "),
        (["partition", "--model", "resnet11"], "model: 'resnet11' is not in the zoo; did you mean resnet101? (known: "),
        (["partition", "--model", "gpt2", "--stages", "none"], "argument --stages/--n_partitions: none is not allowed"),
        (
            ["partition", "--model", "gpt2", "--microbatches", "2"],
            "--microbatches: 2 is fewer than the 4 stages that 1F1B",
        ),
        (
            ["partition", "--model", "gpt2", "--dataset", "cifar10"],
            "--dataset: cifar10 has images and gpt2 reads tokens; give wikitext2 or wikitext103, or --train-data-file",
        ),
        (
            ["partition", "--model", "resnet101", "--dataset", "wikitext2"],
            "--dataset: wikitext2 has words and resnet101 reads images; give imagenet or cifar10 or cifar100",
        ),
        (
            ["partition", "--model", "resnet101", "--train-data-file", "words.txt"],
            "--train-data-file: resnet101 reads images; leave it out",
        ),
        (
            ["partition", "--model", "gpt2", "--dataset", "wikitext2", "--train-data-file", "words.txt"],
            "--train-data-file: words.txt and --dataset wikitext2 are two sources of words; leave one out",
        ),
        (
            ["partition", "--model", "gpt2", "--train-data-file", "nowhere.txt"],
            "--train-data-file: nowhere.txt cannot be read (No such file or directory); give a text file",
        ),
        (
            ["partition", "--model", "gpt2", "--size", "2048"],
            "--size: 2048 is more than the 1024 tokens that gpt2 reads",
        ),
        (["simulate", "nowhere.yaml", "--picture", "/proc/x/run.png"], "--picture: /proc/x cannot be written ("),
        (["partition", "--model", "gpt2", "--output", "/proc/x"], "--output: /proc cannot be written ("),
        (["simulate", "nowhere.yaml", "--picture", "x.foo"], "--picture: x.foo is no PNG file; give a name that ends"),
        (
            ["plan", DIGITS, "pipe.initial_length=4", "--world-size=2", PROFILE],
            "pipe.initial_length: 4 does not divide",
        ),
        (["plan", DIGITS, "--world-size=1024", PROFILE], "train.batch_size: 64 is smaller than dp x M = 1024 x 1"),
        (["plan", DIGITS, "train.precision=float64", PROFILE], "was measured with precision float32, and"),
        (["partition"], "--model: none is given; give one of resnet101, amoebanetd_18_208, "),
        (
            ["partition", "--model", "gpt2", "--tokenizer", "."],
            "--tokenizer: . has no text to read; give --train-data-file",
        ),
        (
            ["partition", "--model", "resnet101", "--tokenizer", "."],
            "--tokenizer: resnet101 reads images; leave it out",
        ),
    ],
)
def test_a_mistake_is_one_line(call: list[str], line: str, profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"--profile={profile}" if part == PROFILE else part for part in call]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("error: ") and line in told
