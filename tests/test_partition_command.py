"""``pipetransformer partition``: the spellings of FTPipe's scripts, and the texts that it reads."""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from pipetransformer.commands import main, partition
from pipetransformer.errors import UserError
from pipetransformer.graphs.zoo import zoo_model
from pipetransformer.graphs.zoo.words import file_text, tokenizer_ids, word_ids, zipf_ids
from pipetransformer.launch.arguments import Parser
from pipetransformer.pipe.planner.costs import Link

VISION = ["--model=amoebanet_4x512_c10", "--batch_size=4", "--dataset=imagenet", "--auto_file_name", "--n_iter=50"]
GPT2 = ["--train_data_file=f.txt", "--n_iter=100", "--analysis_batch_size=1", "--depth=3"]


def parsed(call: list[str]) -> argparse.Namespace:
    parser = Parser(prog="partition")
    partition.add_arguments(parser)
    return parser.parse_args(call)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (VISION, "--model amoebanet_4x512_c10 --batch-size 4 --dataset imagenet --output auto --iterations 50"),
        ([*VISION, "--no_recomputation"], "--model amoebanet_4x512_c10 --batch-size 4 --dataset imagenet --output auto "
         "--iterations 50 --no-recomputation"),
        ([*GPT2, "--n_partitions=2"], "--train-data-file f.txt --iterations 100 --batch-size 1 --depth 3 --stages 2"),
    ],
)  # fmt: skip
def test_the_commands_of_the_original_are_ours(theirs: list[str], ours: str) -> None:
    assert parsed(theirs) == parsed(ours.split())


def test_two_batch_sizes_are_one_line() -> None:
    assert parsed(["--batch_size=4", "--analysis_batch_size=4"]).batch_size == 4
    with pytest.raises(UserError, match=r"--analysis_batch_size: 1 is given, and 4 before it; .* are one option"):
        parsed(["--batch_size=4", "--analysis_batch_size=1"])


def test_names_of_files_tell_what_was_asked() -> None:
    calls = ([], ["--no_recomputation"], ["--n_partitions=2", "--batch_size=3"], ["--size=96", "--labels=vision"])
    bases = [partition._output_base(zoo_model("gpt2"), parsed(["--auto_file_name", *more])) for more in calls]
    names = ("gpt2_4p_bs1", "gpt2_4p_bs1_no_recomputation", "gpt2_2p_bs3", "gpt2_4p_bs1_vision_size96")
    assert bases == [Path(name) for name in names]
    assert partition._output_base(zoo_model("gpt2"), parsed([])) is None


def test_a_data_set_sets_the_size_and_the_model_the_classes() -> None:
    images, source = partition._example(zoo_model("amoebanet_4x512_c10"), parsed(VISION))
    assert images.shape == (4, 3, 224, 224) and source == "4 images of 224 x 224 random pixels"
    images, _ = partition._example(zoo_model("resnet101"), parsed(["--dataset", "cifar10"]))
    assert images.shape == (1, 3, 32, 32)


@pytest.mark.parametrize("model", ["gpt2", "resnet101"])
def test_the_command_of_the_original_runs(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPT-2 is the model of a text, and the labels are those of the script for such a model, or as asked."""
    whole = zoo_model(model)
    size, vocabulary_size = whole.small_input["size"], whole.small_input.get("vocabulary_size", 0)
    build = partial(whole.build, **whole.small)
    small = replace(whole, build=build, size=size, vocabulary_size=vocabulary_size)
    asked: list[str] = []
    monkeypatch.setattr(partition, "zoo_model", lambda name: asked.append(name) or small)
    monkeypatch.setattr(partition, "measure_link", lambda: Link(1000, 1.0))
    (tmp_path / "f.txt").write_text("a b c d " * 20)
    monkeypatch.chdir(tmp_path)
    call = {
        "gpt2": [*GPT2, "--n_partitions=2", "--n_iter=1"],
        "resnet101": ["--model=resnet101", "--n_iter=1", "--n_partitions=2"],
    }[model]
    assert main(["partition", *call]) == 0
    told = capsys.readouterr().out
    assert asked == [model]
    assert ("\nsequential forward {0: " in told) == (model == "gpt2") == ("variance of real" in told)
    assert ("micro-batch: words of f.txt, token ids by frequency\n" in told) == (model == "gpt2")
    if model == "gpt2":
        assert main(["partition", *call, "--labels=vision"]) == 0
        assert "\ntheoretical imbalance:\n" in capsys.readouterr().out


# ---- texts -----------------------------------------------------------------------------------------------------------


def test_words_of_a_file_become_ids_by_frequency(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("b a a c\na b d d\nmore")
    read = partial(file_text, tmp_path / "words.txt")
    ids = partial(word_ids, read, batch_size=2, vocabulary_size=3, source="words.txt")
    assert read(num_words=8) == "b a a c\na b d d\n"  # a file may be large
    assert ids(length=4).tolist() == [[1, 0, 0, 2], [0, 1, 2, 2]]
    with pytest.raises(UserError, match=r"words.txt has 9 words; 10 are needed"):
        ids(length=5)
    drawn = zipf_ids(4, 1000, vocabulary_size=100)
    assert drawn.shape == (4, 1000) and int(drawn.max()) < 100
    assert (drawn == 0).sum() > 1.5 * (drawn == 1).sum() > 0  # Zipf's law


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A folder with a tokenizer of three words and of points, which begins a text with a special token."""
    backend = Tokenizer(WordLevel({"[UNK]": 0, "one": 1, "two": 2, "three": 7, ".": 4}, unk_token="[UNK]"))
    backend.pre_tokenizer = Whitespace()
    backend.post_processor = TemplateProcessing(single="[UNK] $A", special_tokens=[("[UNK]", 0)])
    folder = tmp_path / "tokenizer"
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]").save_pretrained(folder)  # type: ignore[no-untyped-call]
    return folder


def test_a_text_is_tokenised_by_the_tokenizer_of_a_folder(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "f.txt").write_text("two. one two\nfour three.\n")
    arguments = ["--model=gpt2", f"--train_data_file={tmp_path / 'f.txt'}", f"--tokenizer={tokenizer}"]
    ids, source = partition._example(zoo_model("gpt2"), parsed([*arguments, "--size=3", "--batch-size=2"]))
    assert ids.tolist() == [[2, 4, 1], [2, 0, 7]]
    assert source == f"tokens of {tmp_path / 'f.txt'} by the tokenizer of {tokenizer}"
    with pytest.raises(UserError, match=r"f.txt has 7 tokens; 8 are needed"):
        partition._example(zoo_model("gpt2"), parsed([*arguments, "--size=8"]))


def test_a_text_is_read_on_where_words_have_no_token(tokenizer: Path) -> None:
    asked: list[int] = []

    def read(*, num_words: int) -> str:
        asked.append(num_words)
        return "one " * (num_words // 2)  # as if the other half had no token

    ids = tokenizer_ids(read, folder=tokenizer, batch_size=1, length=6, vocabulary_size=8, source="")
    assert ids.shape == (1, 6) and len(asked) > 1


def test_a_tokenizer_that_does_not_fit_is_one_line(tokenizer: Path, tmp_path: Path) -> None:
    ids: Any = partial(tokenizer_ids, lambda num_words: "one two three", batch_size=1, length=3, source="")
    assert torch.equal(ids(folder=tokenizer, vocabulary_size=8), torch.tensor([[1, 2, 7]]))
    (tmp_path / "empty").mkdir()
    for folder, vocabulary_size, line in [
        (tokenizer, 7, r"--tokenizer: .* gives id 7 and the model reads ids below 7; give the tokenizer that belongs"),
        (tmp_path / "nowhere", 8, r"--tokenizer: .*nowhere is no folder; give one that"),
        (tmp_path / "empty", 8, r"--tokenizer: .*empty holds no tokenizer \(.*\); give a folder"),
    ]:
        with pytest.raises(UserError, match=line) as told:
            ids(folder=folder, vocabulary_size=vocabulary_size)
        assert "\n" not in str(told.value)
