"""Saved models at work: predictions for new data, and how good they are."""

from pipetransformer.inference.judgement import Judgement, judge
from pipetransformer.inference.predictor import Prediction, Predictor, open_predictor
from pipetransformer.inference.saved import Saved, find_saved

__all__ = ["Judgement", "Prediction", "Predictor", "Saved", "find_saved", "judge", "open_predictor"]
