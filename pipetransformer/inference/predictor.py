"""Predictions of a saved model, by its own library: nothing here knows of stages, frozen blocks or caches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from pipetransformer.data.questions import best_span
from pipetransformer.data.reading import LABEL_MARK, decoded
from pipetransformer.errors import UserError
from pipetransformer.inference.saved import Saved

Sample = TypeVar("Sample")
_SORTED_TOGETHER = 32  # batches, by length, so that little is padded


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a model says of one sample.

    Attributes:
        label: the name of the class; all labels that are more probable than not, with semicolons between them; the
            answer to a question; empty where there is a score alone.
        score: the probability of the class (0 to 1), or of the most probable label; a regression's value; the summed
            logits of an answer's ends.
        scores: the probability of each class, by its number; empty where there are no classes.
    """

    label: str
    score: float
    scores: tuple[float, ...] = ()


class Predictor(ABC, Generic[Sample]):
    """A model that is asked.

    Attributes:
        names: of the classes; none for scores and answers.
        model: the model, in evaluation.
        takes_paths: whether a sample is the path of a picture.
        several: whether a sample may have any number of labels.
    """

    names: tuple[str, ...] = ()
    model: Any
    takes_paths = False
    several = False

    def predict(self, samples: Iterable[Sample], *, batch_size: int = 32) -> Iterator[Prediction]:
        """A prediction for each sample, in their order."""
        samples = iter(samples)
        while together := list(islice(samples, batch_size * _SORTED_TOGETHER)):
            order = sorted(range(len(together)), key=lambda number: self._size(together[number]))
            found: dict[int, Prediction] = {}
            for first in range(0, len(order), batch_size):
                rows = order[first : first + batch_size]
                with torch.inference_mode():
                    found.update(zip(rows, self._of_batch([together[row] for row in rows])))
            yield from (found[number] for number in range(len(together)))

    def _size(self, sample: Sample) -> int:
        return 0

    @abstractmethod
    def _of_batch(self, samples: Sequence[Sample]) -> list[Prediction]: ...

    def _classes(self, logits: Tensor) -> list[Prediction]:
        chances = logits.float().softmax(dim=1)
        best = chances.argmax(dim=1).tolist()
        return [Prediction(self.names[k], row[k], tuple(row)) for k, row in zip(best, chances.tolist())]


class TextPredictor(Predictor[tuple[str, ...]]):
    """Of one text a sample, or two."""

    def __init__(self, saved: Saved) -> None:
        from transformers import AutoModelForSequenceClassification

        self._tokenizer, self.model = _of_transformers(saved, AutoModelForSequenceClassification)
        names = saved.settings.get("id2label") or {}
        self.several = saved.settings.get("problem_type") == "multi_label_classification"
        is_score = saved.settings.get("problem_type") == "regression"
        self.names = () if is_score else tuple(names[str(number)] for number in range(len(names)))
        self._max_length = saved.config.data.max_length if saved.config is not None else None

    def _size(self, sample: tuple[str, ...]) -> int:
        return sum(map(len, sample))

    def _of_batch(self, samples: Sequence[tuple[str, ...]]) -> list[Prediction]:
        parts = [list(texts) for texts in zip(*samples)]
        lengths = {"truncation": True, "max_length": self._max_length} if self._max_length else {"truncation": True}
        given = self._tokenizer(*parts, padding=True, return_tensors="pt", **lengths)
        logits = self.model(**given).logits
        if self.several:
            return [self._labels(chances) for chances in logits.float().sigmoid().tolist()]
        return self._classes(logits) if self.names else [Prediction("", float(row[0])) for row in logits]

    def _labels(self, chances: list[float]) -> Prediction:
        given = [name for name, chance in zip(self.names, chances) if chance > 0.5]
        return Prediction(LABEL_MARK.join(given), max(chances), tuple(chances))


class ImagePredictor(Predictor[Path]):
    """Of files of pictures, resized and cropped as timm evaluates."""

    takes_paths = True

    def __init__(self, saved: Saved) -> None:
        import timm
        from timm.data import create_transform, resolve_model_data_config  # type: ignore[attr-defined]

        self.names = tuple(saved.settings.get("label_names") or saved.settings["pretrained_cfg"].get("label_names", ()))
        if not self.names:
            self.names = tuple(map(str, range(int(saved.settings["num_classes"]))))
        if saved.base is None:
            self.model = timm.create_model(f"local-dir:{saved.folder}", pretrained=True).eval()
        else:
            import peft

            base = f"local-dir:{saved.base}" if Path(saved.base).is_dir() else saved.base
            made = timm.create_model(base, pretrained=True, num_classes=len(self.names), **saved.settings["model_args"])
            self.model = peft.PeftModel.from_pretrained(made, str(saved.folder)).eval()
        data = {**resolve_model_data_config(self.model), **_input_of(saved)}  # type: ignore[no-untyped-call]
        self._transform: Any = create_transform(**data, is_training=False)
        self._channels = int(data["input_size"][0])

    def _of_batch(self, samples: Sequence[Path]) -> list[Prediction]:
        pictures = [self._transform(decoded(path, channels=self._channels, source=path)) for path in samples]
        return self.of_pixels(torch.stack(pictures))

    def of_pixels(self, pixels: Tensor) -> list[Prediction]:
        """Of normalised pixels, float32 ``[batch, channels, height, width]``."""
        with torch.inference_mode():
            return self._classes(self.model(pixels))


class AnswerPredictor(Predictor[tuple[str, str]]):
    """Of questions, each with its context."""

    def __init__(self, saved: Saved) -> None:
        from transformers import AutoModelForQuestionAnswering

        self._tokenizer, self.model = _of_transformers(saved, AutoModelForQuestionAnswering)
        data = saved.config.data if saved.config is not None else None
        self._max_length, self._stride = (384, 128) if data is None else (data.max_length, data.stride)

    def _of_batch(self, samples: Sequence[tuple[str, str]]) -> list[Prediction]:
        questions, contexts = ([sample[part] for sample in samples] for part in (0, 1))
        encoded = self._tokenizer(
            [question.lstrip() for question in questions],
            contexts,
            truncation="only_second",
            max_length=self._max_length,
            stride=self._stride,
            padding=True,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            return_tensors="pt",
        )
        of_sample = encoded.pop("overflow_to_sample_mapping").tolist()
        offsets = encoded.pop("offset_mapping").numpy().astype(np.int32)
        for window, table in enumerate(offsets):
            table[np.array([part != 1 for part in encoded.sequence_ids(window)])] = -1
        told = self.model(**encoded)
        logits = torch.stack([told.start_logits, told.end_logits], dim=-1).float().numpy()
        best = [Prediction("", -np.inf)] * len(samples)
        for number, window, own in zip(of_sample, logits, offsets):
            score, first, stop = best_span(window, own)
            if score > best[number].score:
                best[number] = Prediction(contexts[number][first:stop], float(score))
        return best


def open_predictor(saved: Saved) -> Predictor[Any]:
    """Loads the model; samples are paths of pictures, tuples of texts, or (question, context).

    Raises:
        UserError: it cannot be loaded.
    """
    kinds: dict[str, Callable[[Saved], Predictor[Any]]] = {
        "image_classification": ImagePredictor,
        "text_classification": TextPredictor,
        "question_answering": AnswerPredictor,
    }
    try:
        return kinds[saved.task](saved)
    except Exception as error:  # whatever three libraries make of files that are not whole
        said = " ".join(str(error).split())[:200]
        raise UserError(f"{saved.folder}: the model cannot be loaded ({type(error).__name__}: {said})") from error


def _of_transformers(saved: Saved, factory: Any) -> tuple[Any, Any]:
    """Tokenizer and model."""
    from transformers import AutoConfig, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    tokenizer = AutoTokenizer.from_pretrained(saved.folder, trust_remote_code=False)
    if saved.base is None:
        model = factory.from_pretrained(saved.folder, trust_remote_code=False)
    else:
        import peft

        settings = AutoConfig.from_pretrained(saved.folder, trust_remote_code=False)
        made = factory.from_pretrained(saved.base, config=settings, trust_remote_code=False)
        model = peft.PeftModel.from_pretrained(made, str(saved.folder))
    return tokenizer, model.eval()


def _input_of(saved: Saved) -> dict[str, Any]:
    """The input that it was trained with, where adapters' files have the base's beside them."""
    own = saved.settings.get("pretrained_cfg", {}) if saved.base is not None else {}
    known = ("input_size", "mean", "std", "crop_pct", "interpolation")
    return {key: tuple(own[key]) if isinstance(own[key], list) else own[key] for key in known if key in own}
