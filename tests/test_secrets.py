"""Secrets stay in the environment, and a private run's files with their owner."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_faults import CONFIG, run

from pipetransformer.config import load_config
from pipetransformer.config.secrets import masked
from pipetransformer.errors import UserError
from pipetransformer.process.failure import describe

TOKEN = "hf_" + 10 * "aB3"


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (f"401 for {TOKEN}: no access", "401 for ***: no access"),
        ("https://anna:open-sesame@example.org/model", "https://***@example.org/model"),
        ("the word swordfish-7 was wrong", "the word *** was wrong"),
        ("run hf_finetune_roberta_base_v2 of sk-learn-baseline-experiment-one", None),
        ("step 7: loss 0.1234 at https://example.org", "step 7: loss 0.1234 at https://example.org"),
    ],
)
def test_secrets_are_masked_where_something_is_told(
    told: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_PASSWORD", "swordfish-7")
    expected = told if expected is None else expected
    assert masked(told) == expected
    assert describe(ValueError(told), followed=False).line.startswith(f"ValueError: {expected}")
    assert told == expected or told not in describe(ValueError(told), followed=False).details


@pytest.mark.parametrize(
    ("override", "key"),
    [
        (f"model.kwargs={{token: {TOKEN}}}", "model.kwargs.token"),
        (f"data.text_columns=[a, {TOKEN}]", "data.text_columns"),
        ("log.name=swordfish-7", "log.name"),
    ],
)
def test_a_configuration_holds_no_secret(override: str, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "swordfish-7")
    with pytest.raises(UserError) as error:
        load_config(CONFIG, [override])
    assert str(error.value).startswith(f"{key}: it holds a secret")


def test_what_a_private_run_writes_is_its_owners_alone(tmp_path: Path) -> None:
    assert run(tmp_path, "run.private=true", "train.epochs=1", timeout=60.0).exit_code == 0
    left = [path for path in (tmp_path / "x").rglob("*") if not path.is_symlink()]
    assert len(left) > 8 and [path for path in left if path.stat().st_mode & 0o077] == []
