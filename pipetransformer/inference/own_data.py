"""A run's model on the evaluation data of its own configuration."""

from __future__ import annotations

import numpy as np

from pipetransformer.data import ImagePreprocessing, describe, load_image_data
from pipetransformer.data.questions import read_squad
from pipetransformer.data.reader import TextReader, reader_of
from pipetransformer.data.reading import drawn, split_labels
from pipetransformer.inference.judgement import Judgement, judge, judge_answers, judge_labels, judge_scores
from pipetransformer.inference.predictor import ImagePredictor, Predictor
from pipetransformer.inference.saved import Saved


def judge_own(saved: Saved, predictor: Predictor[tuple[str, ...]], *, batch_size: int) -> Judgement:
    """The figures on the split ``eval``. Raises UserError where the data cannot be read."""
    assert saved.config is not None
    data = saved.config.data
    if isinstance(predictor, ImagePredictor):
        return _of_pictures(saved, predictor, batch_size=batch_size)
    if saved.task == "question_answering":
        asked = read_squad(data, split="eval", max_samples=data.max_eval_samples).questions
        samples: list[tuple[str, ...]] = [(question.question, question.context) for question in asked]
        told = [prediction.label for prediction in predictor.predict(samples, batch_size=batch_size)]
        return judge_answers(told, [[text for text, _ in question.answers] for question in asked])
    reader: TextReader = reader_of(data)
    names = describe(data).label_names
    texts = reader.read("eval", label_names=names)
    texts = texts.rows(drawn(len(texts.labels), max_samples=data.max_eval_samples))
    samples = list(zip(texts.first)) if texts.second is None else list(zip(texts.first, texts.second))
    predictions = list(predictor.predict(samples, batch_size=batch_size))
    if data.kind == "scores":
        return judge_scores([prediction.score for prediction in predictions], texts.labels.tolist())
    if data.kind == "labels":
        true = [[names[n] for n in np.flatnonzero(row)] for row in texts.labels]
        return judge_labels([split_labels(prediction.label) for prediction in predictions], true, names)
    return judge([prediction.label for prediction in predictions], [names[n] for n in texts.labels], names)


def _of_pictures(saved: Saved, predictor: ImagePredictor, *, batch_size: int) -> Judgement:
    config = saved.config
    assert config is not None
    used = saved.settings["pretrained_cfg"]
    preprocessing = ImagePreprocessing.from_timm(used, size=int(used["input_size"][-1]))
    info = describe(config.data)
    pictures = load_image_data(config.data, info=info, preprocessing=preprocessing, seed=0)["eval"]
    told: list[str] = []
    for first in range(0, len(pictures), batch_size):
        ids = np.arange(first, min(first + batch_size, len(pictures)))
        pixels = pictures.inputs(ids, length=preprocessing.size, epoch=None)["pixel_values"]
        told += [prediction.label for prediction in predictor.of_pixels(pixels)]
    return judge(told, [info.label_names[number] for number in pictures.labels], info.label_names)
