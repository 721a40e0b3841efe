"""A fault to plant: a saved encoder whose leading blocks know nothing."""

from __future__ import annotations

from pathlib import Path

import torch

__all__ = ["redraw"]


def redraw(model: Path, target: Path, *, num_blocks: int) -> None:
    """Writes an encoder to ``target`` with new random weights in its leading ``num_blocks`` blocks."""
    from transformers import AutoConfig, AutoModel, AutoTokenizer

    torch.manual_seed(1)
    fresh = AutoModel.from_config(AutoConfig.from_pretrained(model))
    whole = AutoModel.from_pretrained(model, dtype=torch.float32)
    for old, new in zip(whole.encoder.layer[:num_blocks], fresh.encoder.layer):
        old.load_state_dict(new.state_dict())
    whole.save_pretrained(target)
    AutoTokenizer.from_pretrained(model).save_pretrained(target)
