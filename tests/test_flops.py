"""Operations and bytes counted per unit: those of the whole model's real step, and small ones by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.support.flops import UnitWork, count_work
from pipetransformer.graphs.graph import trace
from pipetransformer.graphs.zoo import zoo_model


def counted(build: Callable[[], nn.Module], example: Tensor) -> tuple[UnitWork, ...]:
    """Of a model that holds nothing."""
    with torch.device("meta"):
        return count_work(trace(build(), (torch.empty_like(example, device="meta"),)))


@pytest.mark.parametrize("name", ["resnet101", pytest.param("amoebanet_4x512_c10", marks=pytest.mark.full), "gpt2_90m"])
def test_units_add_up_to_the_operations_of_a_real_step(name: str) -> None:
    model = zoo_model(name)
    example = model.example(batch_size=2, seed=0, **model.small_input)
    real = model.build(**model.small)
    with FlopCounterMode(display=False) as forward:
        output = real(example)
    with FlopCounterMode(display=False) as backward:
        output.sum().backward()
    work = counted(lambda: model.build(**model.small), example)
    assert sum(unit.forward_flops for unit in work) == forward.get_total_flops()
    assert sum(unit.backward_flops for unit in work) == backward.get_total_flops()


def test_a_graph_with_real_weights_counts_alike() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1))

    example = torch.rand(2, 3, 8, 8)
    assert count_work(trace(build(), (example,))) == counted(build, example)


def test_bytes_are_each_operand_once() -> None:
    """A linear layer of 3 x 5 on 7 rows, the relu behind it, a second one of 5 x 2; 4 bytes a number."""
    first, second = counted(
        lambda: nn.Sequential(nn.Linear(3, 5, bias=False), nn.ReLU(), nn.Linear(5, 2, bias=False)), torch.empty(7, 3)
    )
    assert (first.forward_flops, second.forward_flops) == (2 * 7 * 3 * 5, 2 * 7 * 5 * 2)
    assert (first.backward_flops, second.backward_flops) == (2 * 7 * 3 * 5, 2 * 2 * 7 * 5 * 2)
    product = {"first": 21 + 15 + 35, "second": 35 + 10 + 14}
    assert first.forward_bytes + second.forward_bytes == 4 * (product["first"] + 2 * 35 + product["second"])
    # The weight's gradient of the first; ReLU's, which reads its result; weight's and input's of the second.
    assert first.backward_bytes + second.backward_bytes == 4 * (product["first"] + 3 * 35 + 2 * product["second"])
