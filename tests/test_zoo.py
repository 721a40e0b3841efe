"""Zoo models have the published sizes, compute what the papers define, and export without operations in place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node

from pipetransformer.errors import UserError
from pipetransformer.graphs.graph import trace
from pipetransformer.graphs.zoo import ZOO, zoo_model
from pipetransformer.graphs.zoo.amoebanet import AmoebaNetD, Cell
from pipetransformer.graphs.zoo.unet import UNet

EXACT = 1e-10
NAMES = list(ZOO)
WITH_DROPOUT = ("unet_5_64", "gpt2", "gpt2_90m")


def count(build: Callable[[], nn.Module]) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build().parameters())


def small(name: str) -> tuple[nn.Module, Tensor]:
    """In float64, training mode, without dropout, drawn from seed 0; and an input of two samples."""
    model = ZOO[name]
    torch.manual_seed(0)
    module = model.build(**model.small, **({"dropout": 0.0} if name in WITH_DROPOUT else {}))
    example = model.example(batch_size=2, seed=1, **model.small_input)
    return module.double().train(), example.double() if model.kind == "images" else example


def gradients(module: nn.Module, example: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The output, and every parameter's gradient of its mean square."""
    output = module(example)
    named = dict(module.named_parameters())
    return output, dict(zip(named, torch.autograd.grad(output.square().mean(), list(named.values()))))


def assert_equal(found: Tensor, expected: Tensor, *, name: str) -> None:
    assert found.shape == expected.shape, name
    assert (found - expected).abs().max() <= EXACT * expected.abs().max(), name


@pytest.mark.parametrize("name", NAMES)
def test_number_of_parameters(name: str) -> None:
    assert count(ZOO[name].build) == ZOO[name].num_parameters


@pytest.mark.parametrize(
    "name, published, digits",
    [
        *(("resnet101", 44.55e6, 4), ("amoebanetd_18_208", 81.51e6, 4), ("unet_5_64", 232.69e6, 5)),
        *(("gpt2", 124.44e6, 5), ("gpt2_90m", 89_762_304, 8)),
    ],
)
def test_published_number(name: str, published: float, digits: int) -> None:
    assert float(f"{ZOO[name].num_parameters:.{digits}g}") == pytest.approx(published)


@pytest.mark.parametrize(
    "layers, filters, published",
    [(18, 416, "319.0M"), (18, 544, "542.7M"), (36, 544, "1.06B"), (72, 512, "1.84B")],
)
def test_amoebanet_of_gpipe(layers: int, filters: int, published: str) -> None:
    """GPipe's Table 1, as torchgpipe counts it."""
    found = count(lambda: AmoebaNetD(num_layers=layers, num_filters=filters))
    assert published in (f"{found / 1e6:.1f}M", f"{found / 1e9:.2f}B")


@pytest.mark.parametrize(
    "layers, filters, published",
    [(6, 208, "90M"), (6, 416, "358M"), (6, 544, "613M"), (12, 544, "1.16B"), (24, 512, "2.01B")],
)
def test_amoebanet_of_older_torchgpipe(layers: int, filters: int, published: str) -> None:
    """Its memory benchmark counts layers per group and has 10 classes."""
    found = count(lambda: AmoebaNetD(num_layers=3 * layers, num_filters=filters, num_classes=10, cells="ftpipe"))
    assert published in (f"{found / 1e6:.0f}M", f"{found / 1e9:.2f}B")


@pytest.mark.parametrize(
    "convs, channels, published",
    [(6, 72, "362.2M"), (11, 128, "2.21B"), (24, 128, "4.99B"), (24, 160, "7.80B"), (48, 160, "15.82B")],
)
def test_unet_of_torchgpipe(convs: int, channels: int, published: str) -> None:
    found = count(lambda: UNet(num_convs=convs, base_channels=channels))
    assert published in (f"{found / 1e6:.1f}M", f"{found / 1e9:.2f}B")


@pytest.mark.parametrize("name", NAMES)
def test_export(name: str) -> None:
    """Output and gradients are the module's own, and nothing but BatchNorm's counters is written in place."""
    module, example = small(name)
    program = torch.export.export(module, (example,), strict=False)
    output, expected = gradients(module, example)
    traced_output, traced = gradients(program.module(), example)
    assert_equal(traced_output, output, name=name)
    assert traced.keys() == expected.keys()
    for parameter, gradient in expected.items():
        assert_equal(traced[parameter], gradient, name=parameter)
    in_place = [node for node in program.graph.nodes if node.op == "call_function" and _writes(node)]
    assert all(node.args[0].op == "placeholder" for node in in_place)


def _writes(node: Node) -> bool:
    return getattr(node.target, "__name__", "").split(".")[0].endswith("_")


@pytest.mark.parametrize("name", NAMES)
def test_weights_follow_the_seed(name: str) -> None:
    first, second = small(name)[0], small(name)[0]
    torch.manual_seed(1)
    other = ZOO[name].build(**ZOO[name].small)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters()))
    assert any(not torch.equal(a, b) for a, b in zip(first.float().parameters(), other.parameters()))


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_learns(name: str) -> None:
    """Weights that nothing reads would make a count right by accident."""
    module, example = small(name)
    if name == "resnet101":  # its residual branches start at zero
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.1)
    _, found = gradients(module, example)
    assert not [parameter for parameter, gradient in found.items() if not gradient.abs().max() > 0]


def test_resnet_is_that_of_timm() -> None:
    import timm

    module, example = small("resnet101")
    original = timm.create_model("resnet101", **ZOO["resnet101"].small).double().train()
    nn.init.normal_(module.layer2[1].bn3.weight)  # a residual branch starts at zero and would hide an error
    original.load_state_dict(module.state_dict(), strict=True)
    output, found = gradients(module, example)
    expected_output, expected = gradients(original, example)
    assert torch.equal(output, expected_output)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_gpt2_is_that_of_transformers() -> None:
    from transformers import GPT2LMHeadModel

    module, example = small("gpt2")
    assert isinstance(module, GPT2LMHeadModel)
    assert_equal(module(example), GPT2LMHeadModel.forward(module, example).logits, name="logits")
    assert module.lm_head.weight is module.transformer.wte.weight


def test_positions_of_gpt2_are_a_unit_beside_its_words() -> None:
    """Neither table's look-up needs the other's, so that both may run at once; the first block needs their sum."""
    module, example = small("gpt2")
    graph = trace(module, (example,), depth=3)
    words, positions = graph.units[:2]
    assert (words.name, positions.name) == ("transformer.wte", "transformer.wpe")
    assert positions.parameters == ("transformer.wpe.weight",)
    assert graph.work_needs()[:4] == (frozenset(), frozenset(), frozenset({0, 1}), frozenset({2}))


@pytest.mark.parametrize("name", ["gpt2", "gpt2_90m"])
def test_attention_is_causal(name: str) -> None:
    module, example = small(name)
    changed = example.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 61
    difference = (module(example) - module(changed)).abs().amax(dim=(0, 2))
    assert not difference[:9].any()
    assert (difference[9:] > 0).all()


@pytest.mark.parametrize("cells, outputs", [("gpipe", (0, 3, 4, 6)), ("ftpipe", (3, 4, 6))])
def test_normal_cell(cells: str, outputs: tuple[int, ...]) -> None:
    """Figure of Real et al., written out: five sums, in this order, of states 0 and 1."""
    torch.manual_seed(0)
    cell = Cell(12, 16, 16, is_reduction=False, previous_is_larger=False, cells=cells).double()
    op = cell.operations
    states = [cell.from_current(x := torch.randn(2, 12, 7, 7).double()), torch.randn(2, 16, 7, 7).double()]
    current, previous = states

    def pool(function: Callable[..., Tensor], state: Tensor, index: int, **how: bool) -> Tensor:
        pooled = function(state, 3, 1, 1, **how)
        return pooled if cells == "gpipe" else op[index][2](op[index][1](pooled))

    states.append(op[0](previous) + pool(F.max_pool2d, previous, 1))
    states.append(previous + op[3](current))
    states.append(op[4](current) + op[5](current))
    states.append(pool(F.max_pool2d, states[2], 6) + states[2])
    states.append(pool(F.avg_pool2d, previous, 8, count_include_pad=False) + op[9](states[5]))
    assert_equal(cell(x, previous), torch.cat([states[i] for i in outputs], dim=1), name=cells)


def test_reduction_cell() -> None:
    """Only operations on states 0 and 1 halve; an odd size is rounded up."""
    torch.manual_seed(0)
    cell = Cell(16, 16, 16, is_reduction=True, previous_is_larger=False, cells="gpipe").double()
    op = cell.operations
    current, previous = torch.randn(2, 16, 7, 7).double(), torch.randn(2, 16, 7, 7).double()
    first = cell.from_current(current)
    two = F.max_pool2d(first, 2, 2, ceil_mode=True) + F.max_pool2d(first, 3, 2, 1)
    three = two + op[3](previous)
    four = op[4](two) + F.max_pool2d(two, 3, 1, 1)
    five = three + F.max_pool2d(previous, 2, 2, ceil_mode=True)
    six = F.avg_pool2d(two, 3, 1, 1, count_include_pad=False) + op[9](three)
    output = cell(current, previous)
    assert output.shape == (2, 48, 4, 4)
    assert_equal(output, torch.cat((four, five, six), dim=1), name="reduction")


def test_unet_has_long_skips() -> None:
    """With the deepest level silenced, what each encoder level sends still reaches the output; odd sizes keep size."""
    module, example = small("unet_5_64")
    assert module(example).shape == (2, 1, 64, 64)
    assert module(example[:, :, :61, :59]).shape == (2, 1, 61, 59)
    for parameter in module.bottleneck.parameters():
        nn.init.zeros_(parameter)
    _, found = gradients(module, example)
    assert all(found[f"encoder.{level}.0.0.weight"].abs().max() > 0 for level in range(3))


def test_example_follows_the_seed() -> None:
    for model in ZOO.values():
        first, again, other = (model.example(batch_size=3, seed=seed, **model.small_input) for seed in (0, 0, 1))
        assert torch.equal(first, again) and not torch.equal(first, other)
        assert first.shape == ((3, 3, 64, 64) if model.kind == "images" else (3, 16))


@pytest.mark.parametrize(
    "mistake, line",
    [
        (lambda: zoo_model("resnet10"), "'resnet10' is not in the zoo; did you mean resnet101? (known: resnet101, "),
        (lambda: zoo_model("zzz"), "'zzz' is not in the zoo (known: resnet101, amoebanetd_18_208, "),
        (lambda: AmoebaNetD(num_layers=10), "num_layers: 10 is not allowed; give a multiple of 3"),
        (lambda: AmoebaNetD(num_filters=100), "num_filters: 100 is not allowed; give a multiple of 8"),
        (lambda: UNet(base_channels=5), "base_channels: 5 is not allowed; give a positive even number"),
        (lambda: ZOO["gpt2"].build(width=100), "width: 100 does not divide by num_heads 12"),
    ],
)
def test_mistakes(mistake: Callable[[], object], line: str) -> None:
    with pytest.raises(UserError) as error:
        mistake()
    assert line in str(error.value) and "\n" not in str(error.value)
