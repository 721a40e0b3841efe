"""GPT-2 small of transformers as a graph: token ids in, logits out, and no side tensor that would cross every cut."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from pipetransformer.graphs.zoo.plain_gpt import check_heads


class GPT2(GPT2LMHeadModel):  # type: ignore[no-untyped-call]
    """Token ids [batch, tokens] -> logits [batch, tokens, vocabulary]: GPT2LMHeadModel, embeddings tied.

    Its blocks are run here: the library's forward, when traced, makes a mask [batch, 1, tokens, tokens] that every
    block reads and that would cross every cut. Positions are looked up as there, so that their table is a unit.

    Raises:
        UserError: ``width`` does not divide by ``num_heads``.
    """

    def __init__(
        self,
        *,
        num_layers: int = 12,
        width: int = 768,
        num_heads: int = 12,
        vocabulary_size: int = 50257,
        sequence_length: int = 1024,
        dropout: float = 0.1,
    ) -> None:
        check_heads(width, num_heads)
        super().__init__(
            GPT2Config(
                n_layer=num_layers,
                n_embd=width,
                n_head=num_heads,
                n_positions=sequence_length,
                vocab_size=vocabulary_size,
                bos_token_id=vocabulary_size - 1,
                eos_token_id=vocabulary_size - 1,
                resid_pdrop=dropout,
                embd_pdrop=dropout,
                attn_pdrop=dropout,
                use_cache=False,
            )
        )

    def forward(self, input_ids: Tensor) -> Tensor:
        body: Any = self.transformer
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(0)
        hidden = body.drop(body.wte(input_ids) + body.wpe(positions))
        for block in body.h:
            hidden = block(hidden)
        logits: Tensor = self.lm_head(body.ln_f(hidden))
        return logits
