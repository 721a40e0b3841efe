"""Costs from shapes alone are those of real tensors, and a model that fits no machine here is planned for."""

from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_models import MODELS, inputs_of, wrapped

from pipetransformer.adapter import shapes_alone
from pipetransformer.commands import main
from pipetransformer.config import load_config
from pipetransformer.models import Chain
from pipetransformer.models.values import Values
from pipetransformer.pipe.measure.shapes import Hardware, profile_of_shapes
from pipetransformer.pipe.measure.units import Microbatch, Speeds, count_units
from pipetransformer.pipe.planner.costs import Link, UnitCosts

CPU = torch.device("cpu")
LARGE = """
task: text_classification
model:
  name: llama
  pretrained: false
  kwargs: {hidden_size: 8192, intermediate_size: 28672, num_hidden_layers: 6, num_attention_heads: 64,
           num_key_value_heads: 8, vocab_size: 128256, max_position_embeddings: 8192}
data: {name: demo_text, max_length: 512}
train: {lr: 1.0e-5, batch_size: 64, precision: bfloat16, epochs: 1}
pipe: {recompute: always}
"""
CLUSTER = """
cluster:
  nodes: 2
  devices_per_node: 4
  operations_per_second: 2.0e14
  memory_bytes_per_second: 2 TB
  memory: 72 GB
  inside: {bytes_per_second: 300 GB}
  between: {bytes_per_second: 50 GB}
  host: {bytes_per_second: 25 GB}
"""
HARDWARE = Hardware(Speeds(), Link(0, 1.0), None, Link(0, 1.0), 0.5, None)


def counted(chain: Chain) -> UnitCosts:
    inputs = inputs_of(chain)
    main = inputs[chain.family.main_input]
    chain.train()
    batch = Microbatch(main, {key: inputs[key] for key in chain.input_keys}, main.shape[1])
    (costs,) = count_units(chain, [batch], units=range(chain.num_units))
    return costs


@pytest.mark.parametrize("model", ["vit", "beit", "bert", "distilbert", "gpt2", "llama", "opt", "modernbert"])
def test_costs_of_shapes_are_those_of_real_tensors(model: str) -> None:
    real, _ = wrapped(MODELS[model])
    shapes = MODELS[model]()
    chain = Chain(shapes, name="tiny", device=CPU, head_row_only=False, values=Values(shapes, deferred=None, seed=0))
    with shapes_alone():
        chain.assume_shapes(inputs_of(chain))
        found = counted(chain)
    expected = counted(real)
    tables = sum(buffer.nbytes for buffer in chain.model.buffers())  # which are made anew, as shapes, by the stem
    assert 0 <= found.prefix_bytes[0] - expected.prefix_bytes[0] <= tables
    assert replace(found, prefix_bytes=(expected.prefix_bytes[0], *found.prefix_bytes[1:])) == expected
    assert all(parameter.is_meta for parameter in chain.model.parameters())


@pytest.mark.parametrize("model", ["vit", "gpt2", "modernbert"])
def test_one_of_the_blocks_that_are_alike_tells_of_all(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chain, _ = wrapped(MODELS[model])
    alike = chain.alike()
    assert alike[0] == 0 and alike[-1] == chain.num_units - 1 and len(set(alike)) < chain.num_units
    of_one = counted(chain)
    monkeypatch.setattr(Chain, "alike", lambda self: list(range(self.num_units)))
    assert of_one == counted(chain)


def test_blocks_of_other_sizes_are_not_alike() -> None:
    chain, _ = wrapped(MODELS["vit"])
    before = chain.alike()
    chain.blocks[1].mlp.fc1 = torch.nn.Linear(1, 1)  # type: ignore[union-attr]
    assert before[2] == 1 and chain.alike()[2] == 2


def test_a_model_of_billions_of_weights_is_planned_for_without_one_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text(LARGE)
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert main(["plan", str(tmp_path / "config.yaml"), "--cluster", str(tmp_path / "cluster.yaml")]) == 0
    told = capsys.readouterr().out
    assert "6.18 billion weights" in told
    rows = [line for line in told.splitlines() if " x " in line][1:]
    assert len(rows) == 7 and all("replicated" in row or "-" in row for row in rows)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 4e6, "kB"


def test_a_cluster_says_how_many_ranks_there_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text(LARGE)
    assert main(["plan", str(tmp_path / "config.yaml"), "--cluster", "x.yaml", "--world-size", "4"]) == 2
    assert (
        capsys.readouterr().err
        == "error: --world-size: has no effect with --cluster, whose file says it; leave it out\n"
    )


def test_pictures_have_the_side_of_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        "task: image_classification\nmodel: {name: vit_tiny_patch16_224, pretrained: false}\n"
        "data: {name: digits, image_size: 32}\ntrain: {lr: 0.1, batch_size: 8, epochs: 1}\n"
    )
    profile = profile_of_shapes(load_config(tmp_path / "config.yaml"), HARDWARE, num_ranks=2)
    ((rows, costs),) = profile.job.by_rows.items()
    assert (rows, costs.length, len(profile.job.parameter_bytes)) == (4, 32, 14)
    assert costs.boundary_bytes[1] == 4 * 5 * 192 * 4 // 2, "four patches and the class token, in bfloat16"
