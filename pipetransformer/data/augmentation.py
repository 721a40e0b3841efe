"""Augmentation of training pictures: each is drawn from (seed, view, sample), whatever batch and process it is in."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from pipetransformer.errors import UserError

if TYPE_CHECKING:
    from pipetransformer.config import DataConfig
    from pipetransformer.data.images import ImagePreprocessing

_PADDING_SHARE = 8  # The usual 4 pixels of a 32-pixel picture, in proportion.


def shifted_and_mirrored(pictures: Tensor, draws: np.ndarray) -> Tensor:
    """Each picture shifted by up to an eighth of its size (black comes in), mirrored where the third draw says so.

    Args:
        pictures: [pictures, channels, height, width].
        draws: down, right and mirror, in 0..1 [pictures, 3].
    """
    height, width = pictures.shape[-2:]
    down, right = height // _PADDING_SHARE, width // _PADDING_SHARE
    first_row, first_column = (draws[:, :2] * (2 * down + 1, 2 * right + 1)).astype(np.int64).T
    rows = first_row[:, None] + np.arange(height)
    columns = np.arange(width)
    columns = first_column[:, None] + np.where(draws[:, 2:] < 0.5, columns[::-1], columns)
    padded = F.pad(pictures, (right, right, down, down))
    samples = torch.arange(len(pictures))[:, None, None]
    cropped = padded[samples, :, torch.from_numpy(rows)[:, :, None], torch.from_numpy(columns)[:, None, :]]
    return cropped.permute(0, 3, 1, 2).contiguous()


class TimmTransforms:
    """timm's transforms of training pictures: random resized crop and mirroring, then what ``data`` asks for of
    RandAugment and its kin (arXiv 1909.13719), jitter of colours, and random erasing (arXiv 1708.04896).

    Args:
        seed: of all draws.

    Raises:
        UserError: for a policy that timm cannot read.
    """

    def __init__(self, data: DataConfig, preprocessing: ImagePreprocessing, *, seed: int) -> None:
        try:
            self._make(data, preprocessing)
        except (
            AssertionError,
            KeyError,
            ValueError,
            IndexError,
            TypeError,
        ) as error:  # of a policy that it cannot read
            told = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise UserError(
                f"data.rand_augment: timm cannot read {data.rand_augment} ({told}); give one such as "
                "rand-m9-mstd0.5-inc1 or augmix-m5-w4-d2"
            ) from error
        self._seed = seed

    def _make(self, data: DataConfig, preprocessing: ImagePreprocessing) -> None:
        from torchvision.transforms import Compose, Grayscale

        colours = (sum(preprocessing.mean) / len(preprocessing.mean),) * 3
        in_colours, of_policy, _ = self._made(data, preprocessing, mean=colours, std=(1.0,) * 3)
        _, _, final = self._made(data, preprocessing, mean=preprocessing.mean, std=preprocessing.std)
        grey = [Grayscale()] if preprocessing.channels == 1 else []
        self._transform: Callable[[Image.Image], Tensor] = Compose([in_colours, of_policy, *grey, final])

    def _made(
        self, data: DataConfig, preprocessing: ImagePreprocessing, *, mean: tuple[float, ...], std: tuple[float, ...]
    ) -> Any:
        from timm.data.transforms_factory import create_transform

        return create_transform(
            preprocessing.size,
            is_training=True,
            scale=data.crop_scale,
            color_jitter=data.color_jitter,
            auto_augment=data.rand_augment,
            interpolation=preprocessing.interpolation,
            mean=mean,
            std=std,
            re_prob=data.erasing,
            re_mode="pixel",  # as timm's own script
            separate=True,
        )

    def __call__(self, picture: Image.Image, *, view: int, number: int) -> Tensor:
        """The model's input [channels, size, size]. Call it inside ``own_draws``."""
        (drawn,) = np.random.SeedSequence([self._seed, view, number]).generate_state(1).tolist()
        random.seed(drawn)
        np.random.seed(drawn)
        torch.default_generator.manual_seed(drawn)
        return self._transform(picture)


@contextmanager
def own_draws() -> Iterator[None]:
    """Leaves the random numbers of this process as they were: timm's transforms draw from all three sources."""
    of_python, of_numpy, of_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)
