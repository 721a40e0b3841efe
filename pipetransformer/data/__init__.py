"""Datasets, and the batches of an epoch."""

from pipetransformer.data.batches import Batch, Share, bucket_edges, epoch_batches, replica_share, samples_of_nodes
from pipetransformer.data.dataset import IGNORED, SET_ASIDE, TRAINING, Dataset, Kind
from pipetransformer.data.images import ImageDataset, ImagePreprocessing, load_image_data
from pipetransformer.data.info import DataInfo, channels_of, describe, known_classes
from pipetransformer.data.loader import loader
from pipetransformer.data.mixing import Mixing
from pipetransformer.data.prepared import Lead, alone, cache_folder
from pipetransformer.data.questions import load_squad
from pipetransformer.data.set_aside import set_aside
from pipetransformer.data.text import load_text_data

__all__ = [
    "IGNORED",
    "SET_ASIDE",
    "TRAINING",
    "Batch",
    "DataInfo",
    "Dataset",
    "ImageDataset",
    "ImagePreprocessing",
    "Kind",
    "Lead",
    "Mixing",
    "Share",
    "alone",
    "cache_folder",
    "bucket_edges",
    "channels_of",
    "describe",
    "epoch_batches",
    "known_classes",
    "load_image_data",
    "load_squad",
    "load_text_data",
    "loader",
    "replica_share",
    "samples_of_nodes",
    "set_aside",
]
