"""The zoo by name: constructor, number of parameters and a fitting input of each model.

None of these is trained elastically: they are cut as graphs, analysed and timed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pipetransformer.config.registry import Registry
from pipetransformer.errors import UserError
from pipetransformer.graphs.zoo.amoebanet import AmoebaNetD
from pipetransformer.graphs.zoo.plain_gpt import PlainGPT
from pipetransformer.graphs.zoo.unet import UNet


@dataclass(frozen=True, slots=True)
class ZooModel:
    """A model of one input tensor and one output tensor.

    Attributes:
        num_parameters: parameters of ``build()`` without overrides, tied ones counted once.
        kind: sort of input.
        build: constructor; keyword overrides scale the model; weights are random and follow from torch's seed.
        size: height and width of the images, or tokens of a sequence.
        small: overrides for ``build`` that make a model for tests.
        small_input: overrides for ``example`` that go with ``small``.
        vocabulary_size: bound of the token ids, exclusive; 0 for images.
    """

    name: str
    num_parameters: int
    kind: Literal["images", "tokens"]
    build: Callable[..., nn.Module]
    size: int
    small: Mapping[str, Any]
    small_input: Mapping[str, int]
    vocabulary_size: int = 0

    def example(
        self, *, batch_size: int, seed: int, size: int | None = None, vocabulary_size: int | None = None
    ) -> Tensor:
        """Images [batch_size, 3, size, size] of standard normal pixels, or token ids [batch_size, size]."""
        size = size or self.size
        random = torch.Generator().manual_seed(seed)
        if self.kind == "images":
            return torch.randn(batch_size, 3, size, size, generator=random)
        return torch.randint(vocabulary_size or self.vocabulary_size, (batch_size, size), generator=random)


def zoo_model(name: str) -> ZooModel:
    """The model of that name. Raises UserError with the known names."""
    if name in ZOO:
        return ZOO[name]
    raise UserError(f"model: {name!r} is not in the zoo{ZOO.near(name)} (known: {', '.join(ZOO)})")


def _resnet101(**overrides: Any) -> nn.Module:
    from pipetransformer.graphs.zoo.resnet import resnet101

    return resnet101(**overrides)


def _gpt2(**overrides: Any) -> nn.Module:
    from pipetransformer.graphs.zoo.gpt2 import GPT2  # imports transformers

    return GPT2(**overrides)


_SMALL_AMOEBANET = {"num_layers": 3, "num_filters": 16, "num_classes": 10}
_SMALL_GPT = {"num_layers": 4, "width": 32, "num_heads": 4, "vocabulary_size": 61, "sequence_length": 16}
_SMALL_IMAGE = {"size": 64}
_SMALL_TEXT = {"size": 16, "vocabulary_size": 61}

_MODELS = (
    ZooModel(
        name="resnet101",
        num_parameters=44_549_160,
        kind="images",
        build=_resnet101,
        size=224,
        small={"layers": (1, 2, 1, 1), "channels": (8, 16, 32, 64), "num_classes": 10},
        small_input=_SMALL_IMAGE,
    ),
    ZooModel(
        name="amoebanetd_18_208",
        num_parameters=81_505_540,
        kind="images",
        build=AmoebaNetD,
        size=224,
        small=_SMALL_AMOEBANET,
        small_input=_SMALL_IMAGE,
    ),
    ZooModel(
        name="amoebanet_4x512_c10",
        num_parameters=380_274_698,
        kind="images",
        build=partial(AmoebaNetD, num_layers=12, num_filters=512, num_classes=10, cells="ftpipe"),
        size=224,
        small=_SMALL_AMOEBANET,
        small_input=_SMALL_IMAGE,
    ),
    ZooModel(
        name="unet_5_64",
        num_parameters=232_687_328,
        kind="images",
        build=UNet,
        size=192,
        small={"num_convs": 2, "base_channels": 4, "depth": 3},
        small_input=_SMALL_IMAGE,
    ),
    ZooModel(
        name="gpt2",
        num_parameters=124_439_808,
        kind="tokens",
        build=_gpt2,
        size=1024,
        small=_SMALL_GPT,
        small_input=_SMALL_TEXT,
        vocabulary_size=50257,
    ),
    ZooModel(
        name="gpt2_90m",
        num_parameters=89_762_304,
        kind="tokens",
        build=PlainGPT,
        size=128,
        small=_SMALL_GPT,
        small_input=_SMALL_TEXT,
        vocabulary_size=3000,
    ),
)

ZOO = Registry({model.name: model for model in _MODELS}, key="model")
