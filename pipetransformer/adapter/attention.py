"""Attention of bfloat16 in training on a CPU, computed in float32 where that is faster.

torch's fused kernel has a fast forward and a slow backward there, however small the attention is. With torch 2.15, on a
processor with AMX, that of 16 texts of 16 tokens (12 heads of width 32) takes 0.3 ms forward and 11 ms backward; in
float32 it takes 0.3 ms and 0.6 ms.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["WideAttention", "attentions"]


class WideAttention:
    """A context in which attention over few positions has its products, forward and backward, in float32.

    Only where it is of bfloat16, on the CPU, has gradients to compute and drops nothing out (torch has no fused kernel
    for that).

    Note: libraries take the function from its module at each call, so that it is replaced there, for the time of the
    context; there is no public way to choose a kernel by shape.

    Args:
        most: positions of a sample, at most, that this is for; 0 leaves all as it is.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._attend: Any = None
        self._depth = 0  # it may be entered again inside itself

    def __enter__(self) -> None:
        if self._most and self._depth == 0:
            self._attend = F.scaled_dot_product_attention
            F.scaled_dot_product_attention = self._wide
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._most and self._depth == 0:
            F.scaled_dot_product_attention = self._attend

    def _wide(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        *arguments: Any,
        **keywords: Any,
    ) -> Tensor:
        is_meant = query.dtype == torch.bfloat16 and query.requires_grad and query.device.type == "cpu"
        if not is_meant or dropout_p or key.shape[-2] > self._most:
            return self._attend(query, key, value, attn_mask, dropout_p, *arguments, **keywords)  # type: ignore[no-any-return]
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.float()
        with torch.autocast("cpu", enabled=False):
            found: Tensor = self._attend(
                query.float(), key.float(), value.float(), attn_mask, dropout_p, *arguments, **keywords
            )
        return found.to(query.dtype)


@contextmanager
def attentions() -> Iterator[list[tuple[torch.Size, torch.Size, float]]]:
    """Gives, as a context, the shapes of query [batch, heads, positions, width] and of key of each call of attention,
    and its dropout."""
    found: list[tuple[torch.Size, torch.Size, float]] = []
    attend = F.scaled_dot_product_attention

    def noted(query: Tensor, key: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        found.append((query.shape, key.shape, arguments[2] if len(arguments) > 2 else keywords.get("dropout_p", 0.0)))
        return attend(query, key, *arguments, **keywords)

    F.scaled_dot_product_attention = noted
    try:
        yield found
    finally:
        F.scaled_dot_product_attention = attend
