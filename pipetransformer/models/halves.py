"""The halves of a block: attention and MLP, each with its norm, its dropouts and its residual.

Both run through the block's own modules, in the order in which the block runs them. ``proof.py`` proves them equal to
the block, so that a block that is wired in another way is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from pipetransformer.models import rows


@dataclass(frozen=True, slots=True)
class Halves:
    """The two parts of a family's blocks.

    Attributes:
        attention: ``(block, hidden, **arguments) -> hidden``, with the block's own arguments.
        mlp: the same of the other half.
        attention_prefixes: prefixes, within a block, of the parameters of the attention half.
        mlp_prefixes: prefixes of the parameters of the MLP half.
        attention_of_row: ``(block, hidden, at, **arguments) -> hidden [batch, 1, width]``, the attention half for one
            row of each sample (``rows.row_of``); None where there is none.
    """

    attention: Callable[..., Tensor]
    mlp: Callable[..., Tensor]
    attention_prefixes: tuple[str, ...]
    mlp_prefixes: tuple[str, ...]
    attention_of_row: Callable[..., Tensor] | None = None

    def owner(self, parameter: str) -> int | None:
        """The half (0 or 1) of a parameter, by its name within the block; None where neither owns it."""
        owners = [parameter.startswith(prefixes) for prefixes in (self.attention_prefixes, self.mlp_prefixes)]
        return owners.index(True) if any(owners) else None


# ---- timm ------------------------------------------------------------------------------------------------------------


def _vit_attention(block: Any, hidden: Tensor, **arguments: Any) -> Tensor:
    return hidden + block.drop_path1(block.ls1(block.attn(block.norm1(hidden), **arguments)))  # type: ignore[no-any-return]


def _vit_mlp(block: Any, hidden: Tensor, **arguments: Any) -> Tensor:
    return hidden + block.drop_path2(block.ls2(block.mlp(block.norm2(hidden))))  # type: ignore[no-any-return]


def _scaled_attention(block: Any, hidden: Tensor, **arguments: Any) -> Tensor:
    found = block.attn(block.norm1(hidden), **arguments)
    return hidden + block.drop_path1(found if block.gamma_1 is None else block.gamma_1 * found)  # type: ignore[no-any-return]


def _scaled_mlp(block: Any, hidden: Tensor, **arguments: Any) -> Tensor:
    found = block.mlp(block.norm2(hidden))
    return hidden + block.drop_path2(found if block.gamma_2 is None else block.gamma_2 * found)  # type: ignore[no-any-return]


VIT = Halves(_vit_attention, _vit_mlp, ("norm1.", "attn.", "ls1."), ("norm2.", "mlp.", "ls2."), rows.vit_attention)
SCALED = Halves(_scaled_attention, _scaled_mlp, ("norm1.", "attn.", "gamma_1"), ("norm2.", "mlp.", "gamma_2"))
"""BEiT's and EVA's, whose layer scales are parameters of the block itself."""


# ---- transformers ----------------------------------------------------------------------------------------------------


def _encoder_attention(block: Any, hidden: Tensor, **arguments: Any) -> Tensor:
    return block.attention(hidden, **arguments)[0]  # type: ignore[no-any-return]


def _encoder_mlp(block: Any, hidden: Tensor, **arguments: Any) -> Tensor:
    from transformers.pytorch_utils import apply_chunking_to_forward

    return apply_chunking_to_forward(block.feed_forward_chunk, block.chunk_size_feed_forward, block.seq_len_dim, hidden)


def _distilbert_attention(block: Any, hidden: Tensor, **arguments: Any) -> Tensor:
    return block.sa_layer_norm(block.attention(hidden, **arguments)[0] + hidden)  # type: ignore[no-any-return]


def _distilbert_mlp(block: Any, hidden: Tensor, **arguments: Any) -> Tensor:
    return block.output_layer_norm(block.ffn(hidden) + hidden)  # type: ignore[no-any-return]


def _gpt2_attention(block: Any, hidden: Tensor, **arguments: Any) -> Tensor:
    return block.attn(block.ln_1(hidden), **arguments)[0] + hidden  # type: ignore[no-any-return]


def _gpt2_mlp(block: Any, hidden: Tensor, **arguments: Any) -> Tensor:
    return hidden + block.mlp(block.ln_2(hidden))  # type: ignore[no-any-return]


def _llama_attention(block: Any, hidden: Tensor, **arguments: Any) -> Tensor:
    return hidden + block.self_attn(hidden_states=block.input_layernorm(hidden), **arguments)[0]  # type: ignore[no-any-return]


def _llama_mlp(block: Any, hidden: Tensor, **arguments: Any) -> Tensor:
    return hidden + block.mlp(block.post_attention_layernorm(hidden))  # type: ignore[no-any-return]


def _modernbert_attention(block: Any, hidden: Tensor, **arguments: Any) -> Tensor:
    return hidden + block.attn(block.attn_norm(hidden), **arguments)[0]  # type: ignore[no-any-return]


def _modernbert_mlp(block: Any, hidden: Tensor, **arguments: Any) -> Tensor:
    return hidden + block.mlp(block.mlp_norm(hidden))  # type: ignore[no-any-return]


def _opt_attention(block: Any, hidden: Tensor, **arguments: Any) -> Tensor:
    before, norm = block.do_layer_norm_before, block.self_attn_layer_norm
    found = block.self_attn(hidden_states=norm(hidden) if before else hidden, **arguments)[0]
    hidden = hidden + nn.functional.dropout(found, p=block.dropout, training=block.training)
    return hidden if before else norm(hidden)


def _opt_mlp(block: Any, hidden: Tensor, **arguments: Any) -> Tensor:
    before, norm = block.do_layer_norm_before, block.final_layer_norm
    found = block.fc2(block.activation_fn(block.fc1(norm(hidden) if before else hidden)))
    hidden = hidden + nn.functional.dropout(found, p=block.dropout, training=block.training)
    return hidden if before else norm(hidden)


ENCODER = Halves(
    _encoder_attention, _encoder_mlp, ("attention.",), ("intermediate.", "output."), rows.encoder_attention
)
"""BERT's and its like: a norm follows each residual."""
DISTILBERT = Halves(
    _distilbert_attention,
    _distilbert_mlp,
    ("attention.", "sa_layer_norm."),
    ("ffn.", "output_layer_norm."),
    rows.distilbert_attention,
)
GPT2 = Halves(_gpt2_attention, _gpt2_mlp, ("ln_1.", "attn."), ("ln_2.", "mlp."), rows.gpt2_attention)
LLAMA = Halves(
    _llama_attention,
    _llama_mlp,
    ("input_layernorm.", "self_attn."),
    ("post_attention_layernorm.", "mlp."),
    rows.llama_attention,
)
MODERNBERT = Halves(_modernbert_attention, _modernbert_mlp, ("attn_norm.", "attn."), ("mlp_norm.", "mlp."))
OPT = Halves(_opt_attention, _opt_mlp, ("self_attn.", "self_attn_layer_norm."), ("fc1.", "fc2.", "final_layer_norm."))
