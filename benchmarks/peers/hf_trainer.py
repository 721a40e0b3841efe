"""One epoch by Hugging Face's ``Trainer``, as a user of it would write it, under torchrun or alone; prints its figures.

    python -m benchmarks.peers.hf_trainer WORKERS CONFIG RESULT [key=value ...]

The configuration is the one that our run has: the same model folder, samples, batch, learning rate, decay, warm-up,
clipping, label smoothing, seed, precision and threads. Texts are tokenized before, padded to the longest of a batch,
and batched by length, which is this library's own way to save padding.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
import torch.utils.data as torch_data
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_pt_utils import get_parameter_names

from pipetransformer.config import Config, TrainConfig, load_config
from pipetransformer.data import alone, load_squad, load_text_data
from pipetransformer.data.info import describe
from pipetransformer.process.device import peak_memory_bytes


class Texts(torch_data.Dataset):  # type: ignore[type-arg]
    """Token ids of each sample, as its length is; the longest first, if ``by_length``.

    Args:
        label_names: the model's names of a sample's labels: of the class, or of the first and the last token.
    """

    def __init__(self, data: object, *, label_names: Sequence[str] = ("labels",), by_length: bool = False) -> None:
        lengths: np.ndarray = data.num_tokens  # type: ignore[attr-defined]
        self._data, self._label_names = data, label_names
        self._order = np.argsort(-lengths, kind="stable") if by_length else np.arange(len(lengths))
        self.labels = data.labels[self._order].reshape(-1, len(label_names)).tolist()  # type: ignore[attr-defined]
        self.lengths = [int(n) for n in lengths[self._order]]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, number: int) -> dict[str, object]:
        raw = self._data.inputs(self._order[[number]], length=self.lengths[number], epoch=0)  # type: ignore[attr-defined]
        labels = dict(zip(self._label_names, self.labels[number], strict=True))
        return {**{key: value[0].tolist() for key, value in raw.items()}, **labels}

    def measure(self, told: EvalPrediction) -> dict[str, float]:
        """The metrics of answers, which need all windows of a question, by logits of all windows in this order."""
        assert np.array_equal(np.stack(told.label_ids, axis=-1), self.labels), "windows in another order"
        outputs = np.stack(told.predictions, axis=-1)  # of first and last token
        ids = np.argsort(self._order)  # where each window of the data lies
        predictions = self._data.predict(np.arange(len(ids)), outputs[ids])  # type: ignore[attr-defined]
        return self._data.measure(predictions)  # type: ignore[attr-defined,no-any-return]


class InOrder(Trainer):
    """Evaluates samples in the order that they are given in; the library shuffles them by length, there too."""

    def _get_eval_sampler(self, eval_dataset: Texts) -> torch_data.Sampler[int]:
        return torch_data.SequentialSampler(eval_dataset)


class Clock(TrainerCallback):
    """Notes the seconds of each step, with what is between steps but evaluations, and the metric of each of these."""

    def __init__(self, metric: str) -> None:
        self.steps: list[float] = []
        self.curve: list[tuple[float, float]] = []  # seconds of training so far, metric
        self._metric = metric
        self._mark: float | None = None

    def on_step_begin(self, *_: object, **__: object) -> None:
        if self._mark is None:
            self._mark = perf_counter()

    def on_step_end(self, *_: object, **__: object) -> None:
        assert self._mark is not None
        self.steps.append(perf_counter() - self._mark)
        self._mark = perf_counter()

    def on_evaluate(self, *_: object, metrics: Mapping[str, float], **__: object) -> None:
        self.curve.append((sum(self.steps), metrics[f"eval_{self._metric}"]))
        self._mark = perf_counter()


def accuracy_of(told: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((told.predictions.argmax(1) == told.label_ids).mean())}


def optimizer_of(model: torch.nn.Module, train: TrainConfig) -> torch.optim.Optimizer:
    """As the library makes it, with a rate of its own for what lies behind the encoder."""
    decayed = set(get_parameter_names(model, [torch.nn.LayerNorm], [r"bias"]))
    groups: dict[tuple[float, float], list[torch.nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        is_head = any(head in name for head in ("pooler", "classifier", "qa_outputs"))
        rate = train.lr * (train.head_lr_scale if is_head else 1.0)
        groups.setdefault((rate, train.weight_decay if name in decayed else 0.0), []).append(parameter)
    return torch.optim.AdamW(
        [{"params": found, "lr": rate, "weight_decay": decay} for (rate, decay), found in groups.items()],
        betas=train.betas,
        eps=train.eps,
        fused=True,
    )


def freeze_like(config: Config, model: torch.nn.Module) -> None:
    """Freezes the embeddings and the blocks that policy ``static`` would."""
    if config.freeze.policy == "static" and config.freeze.max_frozen:
        encoder = model.base_model
        for module in (encoder.embeddings, *encoder.encoder.layer[: config.freeze.max_frozen]):
            module.requires_grad_(False)


def loaded(
    config: Config, *, tokenizer: PreTrainedTokenizerFast
) -> tuple[torch.nn.Module, Mapping[str, object], tuple[str, ...]]:
    """The model, the data by split, and the model's names of the labels."""
    # Note: this version keeps the type of the file, which may be float16.
    if config.task == "question_answering":
        model = AutoModelForQuestionAnswering.from_pretrained(config.model.name, dtype=torch.float32)
        splits = load_squad(config.data, tokenizer=tokenizer, lead=alone)
        return model, splits, ("start_positions", "end_positions")
    info = describe(config.data)
    model = AutoModelForSequenceClassification.from_pretrained(
        config.model.name, num_labels=len(info.label_names), dtype=torch.float32
    )
    return model, load_text_data(config.data, info=info, tokenizer=tokenizer, lead=alone), ("labels",)


def main(workers: int, config_path: str, result: str, overrides: list[str]) -> None:
    began = perf_counter()
    config = load_config(config_path, overrides)
    train, ranks = config.train, int(os.environ.get("WORLD_SIZE", "1"))
    tokenizer = AutoTokenizer.from_pretrained(config.model.name)
    model, splits, label_names = loaded(config, tokenizer=tokenizer)
    freeze_like(config, model)
    answers = config.task == "question_answering"
    metric = "f1" if answers else "accuracy"
    clock, data = Clock(metric), Texts(splits["train"], label_names=label_names)
    per_epoch = -(-len(data) // train.batch_size)
    every, total = train.eval_every.steps(per_epoch), per_epoch * train.epochs
    held_out = Texts(splits["eval"], label_names=label_names, by_length=True)  # the same metric in less padding
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=-(-train.batch_size // ranks),
            per_device_eval_batch_size=256,
            num_train_epochs=train.epochs,
            learning_rate=train.lr,
            weight_decay=train.weight_decay,
            adam_beta1=train.betas[0],
            adam_beta2=train.betas[1],
            adam_epsilon=train.eps,
            lr_scheduler_type=train.lr_schedule,
            warmup_steps=train.warmup_ratio,
            max_grad_norm=train.max_grad_norm or 0.0,
            label_smoothing_factor=train.label_smoothing,
            optim="adamw_torch_fused",
            bf16=train.precision == "bfloat16",
            seed=train.seed,
            train_sampling_strategy="group_by_length",
            use_cpu=not torch.cuda.is_available(),
            ddp_backend="gloo" if ranks > 1 and not torch.cuda.is_available() else None,
            dataloader_num_workers=workers,
            eval_strategy="steps" if every < total else "no",
            eval_steps=every,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = (InOrder if answers else Trainer)(
            model=model,
            args=arguments,
            train_dataset=data,
            data_collator=DataCollatorWithPadding(tokenizer),
            eval_dataset=held_out,
            compute_metrics=held_out.measure if answers else accuracy_of,
            callbacks=[clock],
            optimizers=(optimizer_of(model, train) if train.head_lr_scale != 1 else None, None),
        )
        trainer.train()
        peak = peak_memory_bytes(torch.device("cpu"))
        told = trainer.evaluate()
    if int(os.environ.get("RANK", "0")) == 0:
        found = {
            "steps": clock.steps,
            "samples": len(data) * train.epochs,
            "peak_bytes": peak,
            metric: told[f"eval_{metric}"],
            "curve": clock.curve,
            "wall_s": perf_counter() - began,
        }
        Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:])
