"""The last block for the one row that the head reads.

A classifier of the first token (BERT, a ViT with class token) or of the last one (GPT-2, Llama) reads one row of the
last block's output. Keys and values of that block are needed for all rows; queries, output projection and MLP for this
row alone. The same numbers enter the same modules, so that logits and gradients are those of the whole block.
``proof.py`` proves it for every wrapped model; a block that is wired in another way is computed whole.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def row_of(tensor: Tensor, at: Tensor | None) -> Tensor:
    """One row of each sample, [samples, 1, ...].

    Args:
        tensor: rows of samples [samples, rows, ...].
        at: number of each sample's row [samples]; None for the first.
    """
    return tensor[:, :1] if at is None else tensor[torch.arange(len(at), device=at.device), at].unsqueeze(1)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, at: Tensor | None, *, dropout: float, scale: float
) -> Tensor:
    """Attention of one row [samples, 1, heads x width].

    Args:
        query: of that row [samples, heads, 1, width].
        key: of all rows [samples, heads, rows, width]; a key of several heads' is repeated.
        mask: of all rows [samples or 1, 1, rows or 1, rows]; None for none.
    """
    if mask is not None:
        rows = mask.transpose(1, 2).expand(len(query), -1, -1, -1)  # Note: a row of the mask, as of any other tensor.
        mask = row_of(rows, None if rows.shape[1] == 1 else at).transpose(1, 2)
    found = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale, enable_gqa=key.shape[1] != query.shape[1]
    )
    return found.transpose(1, 2).flatten(2)


def _heads(projected: Tensor, width: int) -> Tensor:
    """[samples, rows, heads x width] -> [samples, heads, rows, width]"""
    return projected.view(*projected.shape[:-1], -1, width).transpose(1, 2)


def _rate(dropout: Any) -> float:
    return float(dropout.p) if dropout.training else 0.0


def vit_attention(block: Any, hidden: Tensor, at: Tensor | None, **arguments: Any) -> Tensor:
    own, row, normed = block.attn, row_of(hidden, at), block.norm1(hidden)
    width = own.num_heads * own.head_dim
    weight, bias = own.qkv.weight, own.qkv.bias
    of_query, of_rest = (None, None) if bias is None else (bias[:width], bias[width:])
    query = _heads(F.linear(row_of(normed, at), weight[:width], of_query), own.head_dim)
    key, value = (_heads(part, own.head_dim) for part in F.linear(normed, weight[width:], of_rest).chunk(2, dim=-1))
    rate = _rate(own.attn_drop)
    found = _attend(own.q_norm(query), own.k_norm(key), value, None, at, dropout=rate, scale=own.scale)
    found = own.proj_drop(own.proj(own.norm(found)))
    return row + block.drop_path1(block.ls1(found))  # type: ignore[no-any-return]


def encoder_attention(
    block: Any, hidden: Tensor, at: Tensor | None, *, attention_mask: Tensor | None, **arguments: Any
) -> Tensor:
    own, row = block.attention.self, row_of(hidden, at)
    projected = own.query(row), own.key(hidden), own.value(hidden)
    query, key, value = (_heads(part, own.attention_head_size) for part in projected)
    found = _attend(query, key, value, attention_mask, at, dropout=_rate(own.dropout), scale=own.scaling)
    return block.attention.output(found, row)  # type: ignore[no-any-return]


def distilbert_attention(
    block: Any, hidden: Tensor, at: Tensor | None, *, attention_mask: Tensor | None, **arguments: Any
) -> Tensor:
    own, row = block.attention, row_of(hidden, at)
    projected = own.q_lin(row), own.k_lin(hidden), own.v_lin(hidden)
    query, key, value = (_heads(part, own.attention_head_size) for part in projected)
    found = _attend(query, key, value, attention_mask, at, dropout=_rate(own.dropout), scale=own.scaling)
    return block.sa_layer_norm(own.out_lin(found) + row)  # type: ignore[no-any-return]


def gpt2_attention(
    block: Any, hidden: Tensor, at: Tensor | None, *, attention_mask: Tensor | None, **arguments: Any
) -> Tensor:
    own, row, normed = block.attn, row_of(hidden, at), block.ln_1(hidden)
    weight, bias, width = own.c_attn.weight.t(), own.c_attn.bias, own.embed_dim  # Note: its weights are [in, out].
    query = _heads(F.linear(row_of(normed, at), weight[:width], bias[:width]), own.head_dim)
    rest = F.linear(normed, weight[width:], bias[width:])
    key, value = (_heads(part, own.head_dim) for part in rest.chunk(2, dim=-1))
    found = _attend(query, key, value, attention_mask, at, dropout=_rate(own.attn_dropout), scale=own.scaling)
    return row + own.resid_dropout(own.c_proj(found))  # type: ignore[no-any-return]


def _turned(tensor: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: each pair of numbers, half a head apart, is turned by the angle of its row (RoFormer, 2021)."""
    low, high = tensor.chunk(2, dim=-1)
    return tensor * cos + torch.cat((-high, low), dim=-1) * sin


def llama_attention(
    block: Any,
    hidden: Tensor,
    at: Tensor | None,
    *,
    attention_mask: Tensor | None,
    position_embeddings: tuple[Tensor, Tensor],
    **arguments: Any,
) -> Tensor:
    own, row, normed = block.self_attn, row_of(hidden, at), block.input_layernorm(hidden)
    projected = own.q_proj(row_of(normed, at)), own.k_proj(normed), own.v_proj(normed)
    query, key, value = (_heads(part, own.head_dim) for part in projected)
    cos, sin = position_embeddings  # [1, rows, width]
    cos_at, sin_at = (row_of(table.expand(len(hidden), -1, -1), at) for table in (cos, sin))
    query, key = _turned(query, cos_at[:, None], sin_at[:, None]), _turned(key, cos[:, None], sin[:, None])
    rate = float(own.attention_dropout) if own.training else 0.0
    found = _attend(query, key, value, attention_mask, at, dropout=rate, scale=own.scaling)
    return row + own.o_proj(found)  # type: ignore[no-any-return]
