"""Registries: names and classes that are found, told, and imported no earlier than they are used; and renamed keys."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from pipetransformer.config import Config, DataConfig, FreezeConfig, load_config
from pipetransformer.config.datasets import DATASETS
from pipetransformer.config.policies import POLICIES
from pipetransformer.config.registry import Registry, resolve
from pipetransformer.config.words import allowed
from pipetransformer.data.reader import PictureReader, QuestionReader, TextReader, reader_of
from pipetransformer.errors import UserError
from pipetransformer.freeze import AutoFreeze, build_policy

ROOT = Path(__file__).resolve().parent.parent
MINIMAL = """\
task: image_classification
model: {name: vit_tiny_patch16_224}
data: {name: digits}
train: {epochs: 1, batch_size: 64, lr: 1e-3}
"""
KINDS_OF_READER = {
    "image_classification": PictureReader,
    "text_classification": TextReader,
    "question_answering": QuestionReader,
}


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    path = tmp_path / "minimal.yaml"
    path.write_text(MINIMAL)
    return path


def refused(path: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config(path, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- entries ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DATASETS)
def test_a_dataset_s_reader_is_of_its_task_and_its_kind(name: str) -> None:
    entry, reader = DATASETS[name], reader_of(DataConfig(name=name))
    assert isinstance(reader, KINDS_OF_READER[entry.task])
    assert (reader.names == ()) == (entry.kind != "classes")
    assert (reader.channels is None) == (entry.task != "image_classification")


@pytest.mark.parametrize("name", [name for name, path in POLICIES.items() if path is not None])
def test_a_policy_s_options_are_keys_of_freeze_with_the_same_bounds(name: str) -> None:
    policy = resolve(str(POLICIES[name]))
    for key, field in policy.Options.model_fields.items():
        ours = FreezeConfig.model_fields[key]
        assert allowed(field.annotation, field.metadata) in allowed(ours.annotation, ours.metadata), key
    given = {"max_frozen": 3, "alpha": 0.25, "percentile": 20.0, "settled": 0.4}
    built = build_policy(FreezeConfig(policy=name, **given), num_blocks=8)
    assert built is not None and type(built) is policy
    assert built.options.model_dump() == {key: given[key] for key in policy.Options.model_fields}


def test_an_unknown_name_lists_the_known_ones() -> None:
    registry = Registry({"apple": 1, "pear": 2}, key="fruit.name")
    assert registry["pear"] == 2
    with pytest.raises(
        UserError, match=r'^fruit\.name: "pare" is not allowed; give one of apple, pear; did you mean p'
    ):
        registry["pare"]
    with pytest.raises(UserError, match=r'^fruit\.name: "fig" is not allowed; give one of apple, pear$'):
        registry["fig"]


def test_no_name_falls_through_to_another_entry(minimal: Path) -> None:
    freeze = FreezeConfig().model_copy(update={"policy": "frozen_all"})
    with pytest.raises(UserError, match=r'^freeze\.policy: "frozen_all" is not allowed; give one of none, static'):
        build_policy(freeze, num_blocks=4)
    data = DataConfig(name="digits").model_copy(update={"name": "digit"})
    with pytest.raises(UserError, match=r'^data\.name: "digit" is not allowed; .*; did you mean digits\?$'):
        reader_of(data)
    assert refused(minimal, "data.name=digit").endswith("squad, demo_qa; did you mean digits?")


def test_neither_plan_nor_config_nor_freeze_imports_torch_or_a_reader() -> None:
    """Every module of theirs, and a whole configuration read with each policy."""
    code = """
import importlib, pkgutil, sys
from pathlib import Path
for name in ("plan", "config", "freeze", "pipe.planner"):
    package = importlib.import_module(f"pipetransformer.{name}")
    for module in pkgutil.iter_modules(package.__path__):
        if module.name != "__main__":
            importlib.import_module(f"{package.__name__}.{module.name}")
from pipetransformer.config import load_config
from pipetransformer.config.policies import POLICIES
for policy in POLICIES:
    load_config("config/train_config_digits_no_freeze.yaml", [f"freeze.policy={policy}", "freeze.max_frozen=1"])
loaded = {"torch", "pipetransformer.data"} & set(sys.modules)
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=ROOT)


# ---- a policy by its import path -------------------------------------------------------------------------------------

POLICY = """
from pipetransformer.config import Section

class Fixed:
    class Options(Section):
        count: int = 1
        names: list[str] = []
    needs_norms = False
    may_unfreeze = True
    def __init__(self, num_blocks, *, options):
        self.options = options
    def decide(self, signals):
        return self.options.count

class Old(Fixed):
    def decide(self, interval, *, frozen, norms, before=None):
        return 1

class NoOptions(Fixed):
    Options = None

class NoDecide:
    Options, needs_norms, may_unfreeze = Fixed.Options, False, False

class NoWord(Fixed):
    needs_norms = None

number = 5
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module in the working directory, which is on no path."""
    name = f"policies_of_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(POLICY)
    (tmp_path / f"{name}_raises.py").write_text("{}['no such key']\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    return name


def test_a_policy_is_found_in_the_working_directory_and_given_its_options(minimal: Path, module: str) -> None:
    override = (f"freeze.policy={module}:Fixed", "freeze.options.count=3", "freeze.max_frozen=2")
    config = load_config(minimal, override)
    autofreeze = AutoFreeze.of(config, num_blocks=4, batches_per_epoch=5)
    assert autofreeze.may_unfreeze and not autofreeze.needs_norms
    assert autofreeze.decide(5, frozen=0).frozen == 2
    assert Config.model_validate(config.model_dump()) == config


@pytest.mark.parametrize(
    ("policy", "options", "line"),
    [
        ("MODULE:Missing", "{}", "freeze.policy: MODULE:Missing is not allowed; MODULE has no class Missing"),
        ("MODULE:number", "{}", "freeze.policy: MODULE:number is not allowed; number is no class"),
        (
            "MODULE_gone:Fixed",
            "{}",
            "freeze.policy: MODULE_gone:Fixed is not allowed; MODULE_gone cannot be imported from FOLDER "
            "(ModuleNotFoundError: No module named 'MODULE_gone')",
        ),
        (
            "MODULE_raises:Fixed",
            "{}",
            "freeze.policy: MODULE_raises:Fixed is not allowed; MODULE_raises cannot be imported from FOLDER "
            "(KeyError: 'no such key')",
        ),
        ("MODULE:NoDecide", "{}", "freeze.policy: MODULE:NoDecide is not allowed; a policy needs decide, a method"),
        (
            "MODULE:NoWord",
            "{}",
            "freeze.policy: MODULE:NoWord is not allowed; a policy needs needs_norms, true or false",
        ),
        (
            "MODULE:NoOptions",
            "{}",
            "freeze.policy: MODULE:NoOptions is not allowed; a policy needs Options, a class of "
            "pipetransformer.config.Section",
        ),
        ("MODULE:Fixed", "{count: x}", 'freeze.options.count: "x" is not allowed; give a whole number'),
        ("MODULE:Fixed", "{names: [1]}", "freeze.options.names: [1] is not allowed; give a list"),
        ("MODULE:Fixed", "{cuont: 1}", "freeze.options.cuont: no such key; did you mean freeze.options.count?"),
        ("MODULE:Fixed", "[1]", "freeze.options: [1] is not allowed; give a mapping of names to plain values"),
        (
            "schedule",
            "{alpha: 0.5}",
            "freeze.options: policy schedule has none; leave it out, or give freeze.policy a package.module:Class",
        ),
        (
            "none",
            "{count: 1}",
            "freeze.options: policy none has none; leave it out, or give freeze.policy a package.module:Class",
        ),
        (
            "MODULE:Old",
            "{}",
            "freeze.policy: MODULE:Old is not allowed; decide must take one argument, the signals",
        ),
        (
            "MODULE.Fixed",
            "{}",
            'freeze.policy: "MODULE.Fixed" is not allowed; give one of none, static, schedule, paper, percentile, '
            "plasticity, top_down, guarded, or package.module:Class",
        ),
    ],
)
def test_a_mistake_in_a_policy_gets_one_clear_line(
    minimal: Path, module: str, policy: str, options: str, line: str
) -> None:
    told = refused(minimal, f"freeze.policy={policy.replace('MODULE', module)}", f"freeze.options={options}")
    assert told == line.replace("MODULE", module).replace("FOLDER", str(minimal.parent))


@pytest.mark.parametrize("answer", [-1, 1.5, None, "2"])
def test_an_answer_that_is_no_count_is_a_mistake(answer: object) -> None:
    policy = ModuleType("policy")
    vars(policy).update(may_unfreeze=True, needs_norms=False, decide=lambda signals: answer)
    autofreeze = AutoFreeze(policy, every_steps=1, warmup_steps=0, num_blocks=4)  # type: ignore[arg-type]
    with pytest.raises(
        UserError, match=r"^freeze\.policy: it answers .* at step 3; give a whole number of at least 0$"
    ):
        autofreeze.decide(3, frozen=0)


# ---- a key that had another name -------------------------------------------------------------------------------------


def test_the_old_name_is_read_and_the_new_one_written(minimal: Path) -> None:
    assert load_config(minimal, ["pipe.checkpoint=always"]).pipe.recompute == "always"
    assert load_config(minimal, ["pipe={checkpoint: selective}"]).pipe.recompute == "selective"
    minimal.write_text(MINIMAL + "pipe: {checkpoint: except_last, schedule: gpipe}\n")
    config = load_config(minimal)
    assert (config.pipe.recompute, config.pipe.schedule) == ("except_last", "gpipe")
    assert load_config(minimal, ["pipe.checkpoint=never"]).pipe.recompute == "never"
    assert "  recompute: except_last\n" in config.to_yaml() and "checkpoint: except_last" not in config.to_yaml()
    assert config.with_overrides({"pipe.checkpoint": "always"}).pipe.recompute == "always"


def test_both_names_at_once_are_refused(minimal: Path) -> None:
    line = "pipe.checkpoint: is called pipe.recompute now, and both are given; leave pipe.checkpoint out"
    assert refused(minimal, "pipe.checkpoint=always", "pipe.recompute=always") == line
    minimal.write_text(MINIMAL + "pipe: {checkpoint: always, recompute: always}\n")
    assert refused(minimal) == line
    minimal.write_text(MINIMAL + "pipe: {recompute: always}\n")
    assert refused(minimal, "pipe.checkpoint=always") == line
    with pytest.raises(UserError, match=f"^{line}$"):
        load_config(minimal).with_overrides({"pipe.checkpoint": "always", "pipe.recompute": "always"})


def test_a_mistake_under_the_old_name_is_told_by_it(minimal: Path) -> None:
    allowed = "is not allowed; give one of never, except_last, always, selective"
    assert refused(minimal, "pipe.checkpoint=sometimes") == f'pipe.checkpoint: "sometimes" {allowed}'
    assert refused(minimal, "pipe.recompute=sometimes") == f'pipe.recompute: "sometimes" {allowed}'
