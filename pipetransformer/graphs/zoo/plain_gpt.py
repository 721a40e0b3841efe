"""A plain GPT-2-like language model with an untied head: token ids in, logits out.

No block reads a side tensor: the causal mask is a flag of the attention, and positions are a slice of their table.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from pipetransformer.errors import UserError

_DEVIATION = 0.02


class PlainGPT(nn.Module):
    """Token ids [batch, tokens] -> logits [batch, tokens, vocabulary]: a pre-norm transformer.

    Learned positions, biases in all linear layers but the head, a final norm, a head of its own (not tied to the
    embedding): so the defaults make 89,762,304 parameters. Weights are drawn as GPT-2's.

    Raises:
        UserError: ``width`` does not divide by ``num_heads``.
    """

    def __init__(
        self,
        *,
        num_layers: int = 12,
        width: int = 768,
        num_heads: int = 12,
        vocabulary_size: int = 3000,
        sequence_length: int = 128,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        check_heads(width, num_heads)
        self.tokens = nn.Embedding(vocabulary_size, width)
        self.positions = nn.Embedding(sequence_length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(_Block(width, num_heads, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary_size, bias=False)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                is_last_of_branch = name.endswith(("attention.output.weight", "mlp.output.weight"))
                scale = (2 * num_layers) ** -0.5 if is_last_of_branch else 1.0
                nn.init.normal_(parameter, std=_DEVIATION * scale)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.dropout(self.tokens(input_ids) + self.positions.weight[: input_ids.shape[1]])
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


class _Block(nn.Module):
    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = _Attention(width, num_heads, dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = _Mlp(width, dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden))
        result: Tensor = hidden + self.mlp(self.mlp_norm(hidden))
        return result


class _Attention(nn.Module):
    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        heads = self.query_key_value(hidden).unflatten(-1, (3, self.num_heads, -1)).transpose(1, 3)
        query, key, value = heads.unbind(2)
        attended = F.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout.p if self.training else 0.0, is_causal=True
        )
        result: Tensor = self.dropout(self.output(attended.transpose(1, 2).flatten(2)))
        return result


class _Mlp(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.input = nn.Linear(width, 4 * width)
        self.output = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.dropout(self.output(F.gelu(self.input(hidden), approximate="tanh")))
        return result


def check_heads(width: int, num_heads: int) -> None:
    if width % num_heads:
        raise UserError(f"width: {width} does not divide by num_heads {num_heads}; give a multiple of num_heads")
