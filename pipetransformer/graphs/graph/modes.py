"""Operators with two behaviours, in training and in evaluation: a trace has one written into their arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from pipetransformer.adapter import has_random_tag

_ATEN = torch.ops.aten

# By operator: the position of the argument that training sets, and what evaluation puts there.
_DROPOUTS = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
_SWITCHES: dict[Any, tuple[int, object]] = {
    getattr(_ATEN, f"{name}{in_place}").default: (position, False)
    for name, position in (*((name, 2) for name in _DROPOUTS), ("rrelu", 3))
    for in_place in ("", "_")
}
_SWITCHES[_ATEN.scaled_dot_product_attention.default] = (4, 0.0)


def switched(node: fx.Node) -> bool:
    """Whether ``node`` is such an operator, traced in training mode."""
    if node.target not in _SWITCHES:
        return False
    position, _ = _SWITCHES[node.target]
    return len(node.args) > position and bool(node.args[position])


def draws_numbers(node: fx.Node) -> bool:
    """Whether ``node`` draws random numbers as it was traced."""
    return switched(node) if node.target in _SWITCHES else has_random_tag(node)


class Switched(nn.Module):
    """The operator of ``node``: as traced in training mode, and as in evaluation otherwise."""

    def __init__(self, node: fx.Node) -> None:
        super().__init__()
        self._operator: Any = node.target
        self._position, self._off = _SWITCHES[node.target]

    def forward(self, *arguments: object, **options: object) -> Any:
        if not self.training:
            arguments = (*arguments[: self._position], self._off, *arguments[self._position + 1 :])
        return self._operator(*arguments, **options)
