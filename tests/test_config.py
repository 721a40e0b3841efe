"""What a configuration file may say, and the one line that answers a mistake."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pipetransformer.config import Config, Interval, config_page, load_config
from pipetransformer.config.quantities import parse_num_bytes
from pipetransformer.config.words import text_keys
from pipetransformer.config.yaml_text import parse_override, read_yaml
from pipetransformer.errors import UserError

ROOT = Path(__file__).parent.parent
SHIPPED = sorted((ROOT / "config").glob("train_config_*.yaml"))
MINIMAL = """\
task: image_classification
model: {name: vit_tiny_patch16_224}
data: {name: digits}
train: {epochs: 1, batch_size: 64, lr: 1e-3}
"""


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    path = tmp_path / "minimal.yaml"
    path.write_text(MINIMAL)
    return path


def message_of(path: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_all_sections_but_four_have_defaults(minimal: Path) -> None:
    config = load_config(minimal)
    assert config.train.lr == 1e-3
    assert config.train.betas == (0.9, 0.999)
    assert config.freeze.every == "auto" and config.freeze.guard
    assert config.freeze.warmup == Interval(0, "step")
    assert config.pipe.initial_length == "auto"
    assert config.checkpoint.keep == 1


@pytest.mark.parametrize(
    ("override", "section", "key", "expected"),
    [
        ("train.lr=1e-3", "train", "lr", 1e-3),
        ("train.lr=1E+2", "train", "lr", 100.0),
        ("train.lr=1", "train", "lr", 1.0),
        ("train.betas=[0.8, 0.9]", "train", "betas", (0.8, 0.9)),
        ("train.eval_every=50 steps", "train", "eval_every", Interval(50, "step")),
        ("freeze.warmup=0 epochs", "freeze", "warmup", Interval(0, "epoch")),
        ("freeze.max_frozen=0", "freeze", "max_frozen", 0),
        ("pipe.memory_limit=8 GiB", "pipe", "memory_limit", 8 * 2**30),
        ("pipe.memory_limit=1000", "pipe", "memory_limit", 1000),
        ("cache.host_budget=1.5MB", "cache", "host_budget", 1_500_000),
        ("pipe.enabled=off", "pipe", "enabled", False),
        ("checkpoint.every=null", "checkpoint", "every", None),
        ("model.kwargs={patch_size: 4}", "model", "kwargs", {"patch_size": 4}),
        ("model.kwargs.patch_size=4", "model", "kwargs", {"patch_size": 4}),
        ("run.id=1000", "run", "id", "1000"),
        ("run.id=007", "run", "id", "007"),
        ("run.id=1e5", "run", "id", "1e5"),
        ("run.id=2024-99-99", "run", "id", "2024-99-99"),
        ("run.id='7'", "run", "id", "7"),
        ("run.id=", "run", "id", None),
        ("data.path=../shared/data=x", "data", "path", "../shared/data=x"),
    ],
)
def test_override_is_read_by_the_rules_of_yaml(
    minimal: Path, override: str, section: str, key: str, expected: object
) -> None:
    value = getattr(getattr(load_config(minimal, [override]), section), key)
    assert value == expected
    assert type(value) is type(expected)


def test_later_override_wins_and_a_mapping_replaces(minimal: Path) -> None:
    overrides = ["model.kwargs={depth: 6}", "model.kwargs.patch_size=2", "train.epochs=2", "train.epochs=3"]
    config = load_config(minimal, overrides)
    assert config.model.kwargs == {"depth": 6, "patch_size": 2}
    assert config.train.epochs == 3
    assert load_config(minimal, [*overrides, "model.kwargs={embed_dim: 64}"]).model.kwargs == {"embed_dim": 64}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.batchsize=8", "train.batchsize: no such key; did you mean train.batch_size?"),
        ("train.microbatches=8", "train.microbatches: no such key; did you mean pipe.microbatches?"),
        ("trian.lr=1", "trian: no such key; did you mean train?"),
        ("lr=1", "lr: no such key; did you mean train.lr?"),
        ("dp.zzz=1", "dp.zzz: no such key; dp has enabled, shard"),
        ("train.lr.x=1", "train.lr.x: no such key; train.lr is not a mapping"),
        ("train.epochs=-1", "train.epochs: -1 is not allowed; give a whole number of at least 0"),
        (
            f"train.epochs={10**24}",
            f"train.epochs: {10**24} is not allowed; give a whole number of at least 0, at most {2**31 - 1}",
        ),
        ("run.timeout=1e300", "run.timeout: 1e+300 is not allowed; give a number above 0, at most 2147483647.0"),
        (
            "pipe.memory_limit=1000000000000 TB",
            'pipe.memory_limit: "1000000000000 TB" is not allowed; give a size of at least 1 byte, such as "8 GiB", '
            '"500 MB" or a number of bytes, or null',
        ),
        ('run.dir="a\\0b"', 'run.dir: "a\\u0000b" is not allowed; give text'),
        ("train.epochs='3'", 'train.epochs: "3" is not allowed; give a whole number of at least 0'),
        ("train.epochs=1.0", "train.epochs: 1.0 is not allowed; give a whole number of at least 0"),
        ("train.epochs=true", "train.epochs: true is not allowed; give a whole number of at least 0"),
        ("train.epochs=", "train.epochs: null is not allowed; give a whole number of at least 0"),
        ("train.lr=true", "train.lr: true is not allowed; give a number above 0"),
        ("train.lr=.nan", "train.lr: NaN is not allowed; give a number above 0"),
        ("freeze.alpha=1.5", "freeze.alpha: 1.5 is not allowed; give a number above 0 and below 1"),
        ("freeze.alpha=0", "freeze.alpha: 0 is not allowed; give a number above 0 and below 1"),
        ("freeze.alpha=1", "freeze.alpha: 1 is not allowed; give a number above 0 and below 1"),
        (
            "freeze.policy=papers",
            'freeze.policy: "papers" is not allowed; give one of none, static, schedule, paper, percentile, '
            "plasticity, top_down, guarded, or package.module:Class; did you mean paper?",
        ),
        (
            "freeze.every=0 steps",
            'freeze.every: "0 steps" is not allowed; give a positive interval such as "1 epoch" or "50 steps", or auto',
        ),
        (
            "freeze.every=50",
            'freeze.every: 50 is not allowed; give a positive interval such as "1 epoch" or "50 steps", or auto',
        ),
        (
            "freeze.warmup=-1 epoch",
            'freeze.warmup: "-1 epoch" is not allowed; '
            'give an interval, not negative, such as "0 steps", "50 steps" or "1 epoch"',
        ),
        ("freeze.max_frozen=-1", "freeze.max_frozen: -1 is not allowed; give a whole number of at least 0, or null"),
        (
            "pipe.initial_length=all",
            'pipe.initial_length: "all" is not allowed; give a whole number of at least 1, or auto',
        ),
        (
            "pipe.memory_limit=lots",
            'pipe.memory_limit: "lots" is not allowed; '
            'give a size of at least 1 byte, such as "8 GiB", "500 MB" or a number of bytes, or null',
        ),
        (
            "train.betas=[0.9, 1]",
            "train.betas: [0.9, 1] is not allowed; give a list of 2, each a number of at least 0 and below 1",
        ),
        ("train=5", "train: 5 is not allowed; give a section with epochs, batch_size, lr"),
        ("train={}", "train.epochs: missing; give a whole number of at least 0"),
        ("model.kwargs={1: 2}", 'model.kwargs: {"1": 2} is not allowed; give a mapping of names to plain values'),
        ("run.id=a/b", 'run.id: "a/b" is not allowed; give letters, digits and . _ - (not . at the start), or null'),
        ("train.lr", "train.lr: not an override; write section.key=value"),
        ("=5", "=5: not an override; write section.key=value"),
        ("train..lr=5", "train..lr=5: not an override; write section.key=value"),
        (
            "train.betas=[0.9",
            "train.betas: malformed YAML in '[0.9' (expected ',' or ']', but got '<stream end>')",
        ),
        (
            "data.name=sst2",
            "data.name: sst2 is not for task image_classification; give one of digits, cifar10, cifar100, image_folder",
        ),
        ("freeze.policy=static", "freeze.max_frozen: missing; policy static freezes this many blocks"),
    ],
)
def test_mistake_in_an_override_gets_one_clear_line(minimal: Path, override: str, message: str) -> None:
    assert message_of(minimal, override) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "FILE: empty; a configuration has at least task, model, data and train"),
        ("# nothing\n", "FILE: empty; a configuration has at least task, model, data and train"),
        ("- 1\n", "FILE: no mapping of sections; a configuration has at least task, model, data and train"),
        ("task: a\nmodel: [1\n", "FILE:3: malformed YAML (expected ',' or ']', but got '<stream end>')"),
        ("task: a\n\ttrain: 1\n", "FILE:2: malformed YAML (found character '\\t' that cannot start any token)"),
        ("train:\n  lr: 1\n  lr: 2\n", "FILE:3: malformed YAML (lr is given twice)"),
        ("a: 2024-99-99\n", "FILE: malformed YAML (month must be in 1..12)"),
        ('a: !!float ""\n', "FILE: malformed YAML (string index out of range)"),
        ("a: !!bool maybe\n", "FILE: malformed YAML ('maybe')"),
        ("a: !!timestamp x\n", "FILE: malformed YAML ('NoneType' object has no attribute 'groupdict')"),
        (
            "a: &a [*a]\n",
            "FILE:1: malformed YAML (it has more than 10,000 values, aliases (*name) counted as what they stand for)",
        ),
        ("task: \x00\n", "FILE: malformed YAML (special characters are not allowed)"),
        ("[" * 5000, None),
        (
            MINIMAL.replace("task: image_classification\n", ""),
            "task: missing; give one of image_classification, text_classification, question_answering, own",
        ),
        (MINIMAL.replace("model: {name: vit_tiny_patch16_224}\n", ""), "model: missing; give a section with name"),
        (MINIMAL.replace("lr: 1e-3", "lrr: 1e-3"), "train.lrr: no such key; did you mean train.lr?"),
        (MINIMAL + "freeze:\n", "freeze: null is not allowed; give a section of keys"),
        (MINIMAL + "freezee: {}\n", "freezee: no such key; did you mean freeze?"),
        (
            MINIMAL + "run: {id: 1000}\n",
            "run.id: 1000 is not allowed; give letters, digits and . _ - (not . at the start), or null",
        ),
        (MINIMAL + "on: 1\n", None),
        (MINIMAL + '"a\\nb": 1\n', "a b: no such key; a configuration has " + ", ".join(Config.model_fields)),
        (MINIMAL + "run: &a {dir: *a}\n", None),
    ],
)
def test_mistake_in_a_file_gets_one_clear_line(tmp_path: Path, text: str, message: str | None) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    given = message_of(path).replace(str(path), "FILE")
    assert message is None or given == message


def test_file_that_cannot_be_read_gets_one_clear_line(tmp_path: Path) -> None:
    path = tmp_path / "none.yaml"
    assert message_of(path) == f"{path}: no such file; give the path of a YAML configuration"
    assert message_of(tmp_path) == f"{tmp_path}: cannot be read (Is a directory)"
    path.write_bytes(b"\xff\xfe\x00")
    assert message_of(path) == f"{path}: not a text file; give the path of a YAML configuration"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["run.resume=true", "run.overwrite=true"],
            "run.resume: cannot go with run.overwrite; set one of them to false",
        ),
        (
            ["pipe.initial_length=4", "pipe.microbatches=2"],
            "pipe.microbatches: 2 is not allowed; schedule 1f1b over 4 ranks takes 4 or more, "
            "give that, or another pipe.initial_length",
        ),
        (
            ["task=text_classification", "data.name=sst2", "data.augment=basic"],
            "data.augment: basic is for images; give none",
        ),
    ],
)
def test_keys_that_contradict_each_other_are_refused(minimal: Path, overrides: list[str], message: str) -> None:
    assert message_of(minimal, *overrides) == message


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    key=st.sampled_from(
        sorted(text_keys(Config) | {"train.lr", "train.betas", "freeze.every", "pipe.memory_limit", "x"})
    ),
    value=st.text() | st.recursive(st.integers() | st.floats(), lambda inner: st.lists(inner, max_size=3)).map(str),
)
@example(key="train.lr", value="9" * 400)
@example(key="train.epochs", value="9" * 5000)
@example(key="freeze.every", value="9" * 5000 + " steps")
@example(key="pipe.memory_limit", value="9" * 400 + " TiB")
@example(key="model.kwargs", value="{a: 2024-01-01}")
@example(key="model.kwargs", value="&a {a: *a}")
@example(key="train.lr", value="\ud800")
@example(key="run.id", value="a\x85b\u2028c\nd")
@example(key="data.label_column", value="0\x85")
@example(key="a\nb", value="1")
def test_any_override_gives_a_configuration_or_one_line(minimal: Path, key: str, value: str) -> None:
    try:
        config = load_config(minimal, [f"{key}={value}"])
    except UserError as error:
        assert len(str(error).splitlines()) == 1
    else:
        resolved = minimal.with_name("resolved.yaml")
        resolved.write_text(config.to_yaml(), encoding="utf-8")
        assert load_config(resolved) == config


def test_gpipe_takes_fewer_microbatches_than_stages(minimal: Path) -> None:
    config = load_config(minimal, ["pipe.initial_length=4", "pipe.microbatches=2", "pipe.schedule=gpipe"])
    assert config.pipe.microbatches == 2


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["model.kwargs={a: [1, {b: null}], c: '1e-3'}", "run.id=1e5", "log.name=2024-01-01"],
        ["pipe.memory_limit=8 GiB", "freeze.every=7 steps", "train.betas=[0, 0.5]", "checkpoint.every=null"],
    ],
)
def test_resolved_yaml_loads_back_equal(minimal: Path, tmp_path: Path, overrides: list[str]) -> None:
    config = load_config(minimal, overrides)
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(config.to_yaml())
    assert load_config(resolved) == config
    assert list(yaml.safe_load(config.to_yaml())) == list(Config.model_fields)


def test_with_overrides_gives_a_checked_copy(minimal: Path) -> None:
    config = load_config(minimal)
    changed = config.with_overrides({"run.id": "x", "freeze.every": Interval(2, "step"), "model.kwargs.depth": 1})
    assert (changed.run.id, changed.freeze.every, changed.model.kwargs) == ("x", Interval(2, "step"), {"depth": 1})
    assert (config.run.id, config.model.kwargs) == (None, {})
    with pytest.raises(UserError, match="train.epochs: -1 is not allowed"):
        config.with_overrides({"train.epochs": -1})


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_configuration_is_valid(path: Path) -> None:
    load_config(path)


@pytest.mark.parametrize("job", ["digits", "cifar100", "sst2"])
def test_shipped_pair_differs_in_freeze_alone(job: str) -> None:
    elastic = load_config(ROOT / "config" / f"train_config_{job}_all_in_one.yaml")
    plain = load_config(ROOT / "config" / f"train_config_{job}_no_freeze.yaml")
    assert elastic.freeze.policy == "guarded"
    assert plain.freeze.policy == "none"
    assert elastic.model_copy(update={"freeze": plain.freeze}) == plain


def test_reference_page_is_the_schema() -> None:
    assert (ROOT / "docs" / "config.md").read_text() == config_page(), "run the command that the page names"


def test_every_key_is_documented() -> None:
    for name, field in Config.model_fields.items():
        assert field.description, name
        for key, leaf in getattr(field.annotation, "model_fields", {}).items():
            assert leaf.description, f"{name}.{key}"


def test_reading_a_configuration_does_not_import_torch() -> None:
    code = "import sys, pipetransformer.config; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("text", "canonical", "steps"),
    [("1 epoch", "1 epoch", 10), ("2 epochs", "2 epochs", 20), ("1 steps", "1 step", 1), ("0 steps", "0 steps", 0)],
)
def test_interval_counts_steps(text: str, canonical: str, steps: int) -> None:
    interval = Interval.parse(text)
    assert str(interval) == canonical
    assert Interval.parse(canonical) == interval
    assert interval.steps(10) == steps


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("1 B", 1), ("1kB", 1000), ("2 KiB", 2048), ("1.5 gib", 3 * 2**29), ("2 TB", 2 * 10**12)]
)
def test_size_has_decimal_and_binary_units(text: str, num_bytes: int) -> None:
    assert parse_num_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GB", "-1 GB", "1 GB extra", "1 XB", "1e3 MB"])
def test_other_text_is_no_size(text: str) -> None:
    with pytest.raises(ValueError):
        parse_num_bytes(text)


def test_aliases_may_not_grow_without_bounds(tmp_path: Path) -> None:
    levels = [f"l{number}: &l{number} [{', '.join([f'*l{number - 1}'] * 9)}]" for number in range(1, 7)]
    file = tmp_path / "config.yaml"
    file.write_text("\n".join(["l0: &l0 [1]", *levels]) + "\n")
    with pytest.raises(UserError, match="more than 10,000 values"):
        read_yaml(file)
    with pytest.raises(UserError, match="more than 10,000 values"):
        parse_override(f"model.kwargs=[{', '.join(['1'] * 10_000)}]", text_keys=())
    file.write_text("base: &base {lr: 1}\ntrain: {<<: *base, epochs: 3}\n")
    assert read_yaml(file)["train"] == {"lr": 1, "epochs": 3}
