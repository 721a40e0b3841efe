"""LoRA: law 1 for adapters, which train in place of the weights of blocks; peft's own files; and what is refused."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import peft
import pytest
import torch
from laws import (
    SHRINK_AND_GROW,
    TWO_RANKS,
    Case,
    Weights,
    configuration,
    deviation,
    elastic_run,
    gradient_deviation,
    is_base,
    model_overrides,
    reference,
)
from ranks import RankPool
from test_planner import random_job
from tiny import tiny_bert, tiny_sst2, tiny_text_model
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from pipetransformer.data import alone
from pipetransformer.errors import UserError
from pipetransformer.freeze import AutoFreeze, GuardSize
from pipetransformer.pipe.planner.choice import Planner
from pipetransformer.pipe.planner.constraints import Constraints
from pipetransformer.pipe.planner.search import predict
from pipetransformer.pipe.planner.transition_cost import transition_bytes
from pipetransformer.plan import ParallelPlan
from pipetransformer.process.world import World
from pipetransformer.run import events
from pipetransformer.run.job import Job, build_job
from pipetransformer.trainer import Trainer

LAST_FOUR = ((0, 2, 4), (4, 3, 2), (8, 4, 1), (12, 4, 2), (16, 2, 4))  # (step, frozen blocks, pp) on 4 ranks
FAMILIES = {"gpt2": "GPT2", "llama": "Llama", "opt": "OPT", "modernbert": "ModernBert", "distilbert": "DistilBert"}
LIKE_THEM = {"roberta": "Roberta", "electra": "Electra", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
PICTURES = {"beit": ("targets=[proj, fc1]",), "eva": ("targets=[proj, fc2]",), "deit": ("r=4",)}
CASES = {
    "last four blocks, cached": Case("bert", 4, LAST_FOUR, 4, cached=True, lora=("r=2", "blocks=4")),
    "pictures, sgd": Case("vit", 4, SHRINK_AND_GROW, 4, optimizer="sgd", lora=("r=4", "alpha=32")),
    "all shared out": Case("bert", 4, LAST_FOUR, 4, shard="full", lora=("blocks=4",)),
    "backward in halves": Case("bert", 2, TWO_RANKS, schedule="zero_bubble", lora=("r=4",)),
    "halves, of which one trains": Case("bert", 2, TWO_RANKS, units="half", lora=("targets=[query, value]",)),
    "prefix in place": Case("bert", 4, LAST_FOUR, 4, prefixes=("in_place",) * 5, lora=("blocks=4",)),
    "recomputed": Case("bert", 2, TWO_RANKS, recompute="always", lora=("r=4",)),
    "gpt2": Case("gpt2", 2, TWO_RANKS, lora=("r=4",)),
}
MORE_CASES = {
    "all blocks, on 2 ranks": Case("bert", 2, TWO_RANKS, lora=("r=4",)),
    "optimizer shared out": Case("bert", 4, LAST_FOUR, 4, shard="optimizer", lora=("blocks=4",)),
    **{family: Case(family, 2, TWO_RANKS, lora=("r=4",)) for family in [*FAMILIES, *LIKE_THEM][1:]},
    **{family: Case(family, 2, TWO_RANKS, lora=lora) for family, lora in PICTURES.items()},
}
ALONE = World(0, 1, 0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("texts")
    tiny_bert(folder / "bert", layers=6)
    tiny_sst2(folder / "sst2", 150, num_eval_samples=40)
    for name, family in (FAMILIES | LIKE_THEM).items():
        tiny_text_model(folder / name, family)
    return str(folder)


def job_of(model: str, data: str, *overrides: str) -> Job:
    return build_job(configuration(model, [*model_overrides(model, data), *overrides]), ALONE, lead=alone)


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.full) for name in MORE_CASES)])
def test_elastic_is_plain(name: str, ranks: RankPool, texts: str, tmp_path: Path) -> None:
    case = (CASES | MORE_CASES)[name]
    weights, gradients = reference(case, texts)
    answers = ranks.run(case.world_size, elastic_run, case, texts, str(tmp_path))
    assert gradient_deviation([g for _, g in answers], gradients) < 1e-10
    ours: Weights = answers[0][0]
    left_out = set(weights) - set(ours)
    assert left_out and all(map(is_base, left_out)), "what never trains is neither gathered nor saved"
    assert deviation(ours, {key: value for key, value in weights.items() if key in ours}) < 1e-10
    adapters = [key for key in ours if "lora_B" in key]
    assert adapters and all(np.abs(ours[key]).max() > 0 for key in adapters[-2:]), "they have learnt"


@pytest.mark.parametrize("model", ["bert", "vit", *FAMILIES, *LIKE_THEM])
def test_peft_loads_what_was_saved(model: str, texts: str, tmp_path: Path) -> None:
    job = job_of(model, texts, "model.lora.r=4", "model.lora.blocks=2", "train.precision=float32")
    network = job.whole_model().eval()
    with torch.no_grad():
        for number, (name, parameter) in enumerate(network.named_parameters()):
            if not is_base(name):
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
    job.built.save(tmp_path, ((name, p.detach()) for name, p in job.chain.trained_parameters(range(8)).items()))
    data = job.datasets["train"]
    inputs = data.inputs(np.arange(3), length=int(data.lengths.max()), epoch=0)
    loaded = peft.PeftModel.from_pretrained(unadapted(model, texts), str(tmp_path)).eval()
    if model == "vit":
        pixels = inputs["pixel_values"].float()
        assert torch.equal(loaded(pixels), network(pixels))
    else:
        given = {key: inputs[key] for key in ("input_ids", "attention_mask")}
        assert torch.equal(loaded(**given).logits, network(**given).logits)
    assert {path.name for path in tmp_path.glob("*.safetensors")} == {"adapter_model.safetensors"}


def unadapted(model: str, data: str) -> torch.nn.Module:
    """The model that ``job_of`` puts adapters into, as its user has it."""
    if model != "vit":
        return AutoModelForSequenceClassification.from_pretrained(f"{data}/{model}", num_labels=2)
    return job_of("vit", data, "train.precision=float32").whole_model()


def test_blocks_without_adapters_are_frozen_and_cached_from_the_first_step_on(ranks: RankPool, texts: str) -> None:
    plans = ranks.run(2, plans_of_a_run, texts, ["model.lora.blocks=2", "freeze.policy=none"])[0]
    assert [plan["frozen"] for plan in plans] == [4] * len(plans)
    assert plans[-1]["cached"] == 4 and all(plan["stem_frozen"] for plan in plans)
    without = ranks.run(2, plans_of_a_run, texts, ["model.lora.r=4", "freeze.policy=none"])[0]
    assert [(plan["frozen"], plan["cached"]) for plan in without] == [(0, None)]


def plans_of_a_run(world: World, data: str, overrides: list[str]) -> list[dict[str, object]]:
    """All plans of a live run."""
    found: list[dict[str, object]] = []

    def hear(event: events.Event) -> None:
        if isinstance(event, events.Adopted):
            found.append(event.plan.as_dict())

    with tempfile.TemporaryDirectory() as folder:
        settings = [*model_overrides("bert", data), "train.epochs=12", f"run.dir={folder}", "run.id=live", *overrides]
        Trainer(configuration("bert", settings), world, listeners=[hear]).run()
    return found


def test_base_weights_hold_neither_gradients_nor_moments() -> None:
    job = replace(random_job(Random(1), 6), optimizer_factor=3.0, num_ranks=4, parked_from=None)
    adapted = replace(job, trained_bytes=(0, *(n // 10 for n in job.parameter_bytes[1:])))
    for shard in ("none", "optimizer"):
        plan = ParallelPlan(0, 1, 4, (), 2, "1f1b", None, 4, stem_frozen=True, shard=shard)
        whole, small = (predict(plan, costs=costs, global_batch_size=32).memory_bytes[0] for costs in (job, adapted))
        assert small < whole
    assert adapted.lasting_bytes == tuple(w + 2 * t for w, t in zip(job.parameter_bytes, adapted.gradient_bytes))
    assert adapted.frozen_bytes(3) == job.frozen_bytes(3), "weights are there either way"
    assert transition_bytes(plan, replace(plan, frozen=2), costs=adapted) == 0


FREED = Constraints(4, 32, (("1f1b", 1),), 4, (1, 2, 4), None, stem_frozen=True)


def test_no_plan_thaws_blocks_in_which_nothing_trains() -> None:
    costs = replace(random_job(Random(1), 8), num_ranks=4)
    planner = Planner(FREED, num_blocks=6, local_size=4, least_frozen=2)
    first = planner.first_plan(costs, {}).plan
    assert first.frozen == 2 and first.cached is None
    assert {prediction.plan.frozen for prediction in planner.static_layouts(costs)} == {2}
    assert all(prediction.plan.frozen > 2 for prediction in planner.shortest_steps(costs))
    assert [prediction.plan.frozen for prediction in planner.steady_plans(costs, has_cache=True)] == [2, 3, 4, 5, 6]
    kept = replace(planner, first=replace(FREED, pipeline_lengths=(4,)), keeps_length=True, least_frozen=5)
    plan = ParallelPlan(5, 4, 1, (2, 4, 6), 4, "1f1b", None, 6, stem_frozen=True, prefix="in_place")
    assert kept.max_frozen(plan) == 5


def test_a_limit_that_holds_nothing_is_told_with_the_place_of_the_prefix() -> None:
    costs = replace(random_job(Random(1), 8), num_ranks=4, parameter_bytes=(10**6,) * 8, trained_bytes=(10,) * 8)
    first = replace(FREED, memory_limit=1000, prefixes=("replicated", "in_place"))
    planner = Planner(first, num_blocks=6, local_size=4, least_frozen=5, limit_key="pipe.memory_limit")
    with pytest.raises(UserError, match=r"^pipe.memory_limit: .* at least \d+, with the prefix in its stages$"):
        planner.first_plan(costs, {})


def test_the_guard_trusts_blocks_in_which_nothing_trains() -> None:
    settings = [*model_overrides("vit", ""), "model.lora.blocks=2", "freeze.policy=guarded"]
    size = GuardSize(num_samples=20, every=2)
    guarded = AutoFreeze.of(configuration("vit", settings), num_blocks=6, batches_per_epoch=50, guard=size)
    guarded.probed([0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.9])
    assert guarded.guard is not None and guarded.guard.trusted == 4


REFUSED = {
    "model.lora.targets=[query, keys]": "targets: keys is no linear layer of .*'s blocks; give of query, key, value",
    "model.lora.targets=[]": r"model.lora.targets: \[\] is not allowed; give a list of module names, or all-linear",
    "model.lora.blocks=9": "model.lora.blocks: .* has 6 blocks; give at most 6",
    "model.lora.rank=4": "model.lora.rank: no such key; model.lora has r, alpha, dropout, targets, blocks",
    "model.lora.r=0": "model.lora.r: 0 is not allowed; give a whole number of at least 1",
}


@pytest.mark.parametrize("override", REFUSED)
def test_mistakes_are_one_line(override: str, texts: str) -> None:
    with pytest.raises(UserError, match=REFUSED[override]):
        job_of("bert", texts, override)


def test_adapters_belong_to_the_weights_of_the_files(texts: str, tmp_path: Path) -> None:
    """Rounded ones are not saved beside them; those that are in bfloat16 are as they were."""
    narrow = ["model.lora.r=4", "model.dtype=bfloat16", "train.precision=float32"]
    with pytest.raises(UserError, match="model.dtype: the weights of .* are float32, and adapters"):
        job_of("bert", texts, *narrow)
    bert = AutoModelForSequenceClassification.from_pretrained(f"{texts}/bert").bfloat16()
    bert.save_pretrained(tmp_path / "bert")
    AutoTokenizer.from_pretrained(f"{texts}/bert").save_pretrained(tmp_path / "bert")
    job = job_of("bert", texts, *narrow, f"model.name={tmp_path}/bert")
    network = job.whole_model().eval()
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter.add_(0.0 if is_base(name) else 0.1)
    job.built.save(tmp_path / "new", job.chain.trained_parameters(range(8)).items())
    settings = AutoConfig.from_pretrained(tmp_path / "new")
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "bert", config=settings)
    loaded = peft.PeftModel.from_pretrained(base, str(tmp_path / "new")).eval()
    inputs = {"input_ids": torch.arange(5, 25).view(2, 10), "attention_mask": torch.ones(2, 10, dtype=torch.long)}
    assert torch.equal(loaded(**inputs).logits, network(**inputs).logits)


def test_an_adapter_that_its_block_does_not_call_is_refused() -> None:
    """EVA reads the weight of its queries, keys and values without a call of the layer."""
    with pytest.raises(UserError, match=r"targets: .*qkv of .* is never called.*; give \[proj, fc1, fc2\]"):
        job_of("eva", "", "model.lora.r=4")
    job_of("eva", "", "model.lora.targets=[proj, fc2]")


def test_a_folder_of_adapters_is_no_model(texts: str, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="model.name: .* holds adapters; give the folder of the model"):
        job_of("bert", texts, f"model.name={tmp_path}")


def test_the_schedule_to_come_begins_with_the_blocks_without_adapters() -> None:
    settings = [*model_overrides("vit", ""), "model.lora.blocks=2", "freeze.policy=schedule", "freeze.guard=false"]
    autofreeze = AutoFreeze.of(configuration("vit", settings), num_blocks=6, batches_per_epoch=5)
    schedule = autofreeze.schedule()
    assert schedule and all(frozen > 4 for _, frozen in schedule)
    assert autofreeze.due(0) and autofreeze.decide(0, frozen=4).frozen == 4


def test_fewer_frozen_blocks_than_those_without_adapters_are_refused() -> None:
    settings = [*model_overrides("vit", ""), "model.lora.blocks=2", "freeze.policy=static", "freeze.max_frozen=3"]
    with pytest.raises(UserError, match="freeze.max_frozen: 3 is less than the 4 blocks .* give at least 4"):
        AutoFreeze.of(configuration("vit", settings), num_blocks=6, batches_per_epoch=5)
