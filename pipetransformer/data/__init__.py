"""Datasets, and the batches of an epoch."""

from pipetransformer.data.batches import Batch, Share, bucket_edges, epoch_batches, replica_share
from pipetransformer.data.dataset import IGNORED, Dataset, Kind
from pipetransformer.data.images import ImagePreprocessing, load_image_data
from pipetransformer.data.info import DataInfo, describe
from pipetransformer.data.loader import loader
from pipetransformer.data.text import load_text_data

__all__ = [
    "IGNORED",
    "Batch",
    "DataInfo",
    "Dataset",
    "ImagePreprocessing",
    "Kind",
    "Share",
    "bucket_edges",
    "describe",
    "epoch_batches",
    "load_image_data",
    "load_text_data",
    "loader",
    "replica_share",
]
