"""A run without freezing, on one rank, up to step ``LAST``: it notes every candidate signal that a policy could know.

    python -m benchmarks.signals.collect CONFIG RESULT [key=value ...]

Nothing that is noted changes the steps.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from torch import Tensor

from benchmarks.signals import rules
from pipetransformer.config import load_config
from pipetransformer.engine.linear_probe import boundary_scores, pooled
from pipetransformer.freeze import free_blocks
from pipetransformer.process.world import close_world, init_world
from pipetransformer.trainer import Trainer

FIRST, LAST = 50, 100  # steps between which signals are averaged
_NUM_SAMPLES = 128  # whose activations tell plasticity


class _Enough(Exception):
    """All signals are noted."""


class Signals:
    """Notes signals as the trainer's probe. ``trainer`` is set before it runs."""

    trainer: Trainer

    def __init__(self) -> None:
        self._norms: dict[bool, list[np.ndarray]] = defaultdict(list)  # by whether the step is FIRST or later
        self._halves = [dict[str, Tensor](), dict[str, Tensor]()]  # sums of gradients of even and of odd steps
        self._weights: dict[str, Tensor] = {}
        self._progress: np.ndarray = np.zeros(0)
        self._features: dict[int, list[np.ndarray]] = {}

    def note(self, step: int, gradients: Mapping[str, Tensor]) -> None:
        """Called with every step's gradients, before clipping. Raises _Enough at step ``LAST``."""
        if step in (0, FIRST, LAST):
            self._features[step] = self._outputs()
        if step == LAST:
            raise _Enough
        parameters = self.trainer.engine.layout.parameters
        self._norms[step >= FIRST].append(np.sqrt(self._by_block({n: g.square().sum() for n, g in gradients.items()})))
        if step < FIRST:
            return
        half = self._halves[step % 2]
        for name, gradient in gradients.items():
            half[name] = half[name].add_(gradient) if name in half else gradient.clone()
        if self._weights:
            # The update that the step before has made, by this step's gradient, which it has not seen.
            gains = {n: -((parameters[n].detach() - self._weights[n]) * g).sum() for n, g in gradients.items()}
            self._progress = self._progress + self._by_block(gains)
        else:
            self._progress = np.zeros(self.trainer.job.chain.num_blocks)
        self._weights = {name: parameters[name].detach().clone() for name in gradients}

    def _by_block(self, values: Mapping[str, Tensor]) -> np.ndarray:
        """Sums of numbers over the parameters of each block."""
        chain = self.trainer.job.chain
        sums = np.zeros(chain.num_blocks + 2)
        for name, value in values.items():
            sums[chain.numbering.part_of(chain.unit_of(name))] += float(value)
        return sums[1:-1]

    def _outputs(self) -> list[np.ndarray]:
        """Mean activations behind each block, of some training samples of one length."""
        chain, data = self.trainer.job.chain, self.trainer.job.datasets["train"]
        lengths, counts = np.unique(data.lengths, return_counts=True)
        length = int(lengths[np.argmax(counts)])
        ids = np.flatnonzero(data.lengths == length)[:_NUM_SAMPLES]
        chain.train(False)
        found = pooled(chain, data, [(ids, length)])
        chain.train()
        return [of_batch for (of_batch,) in found[1:]]

    def told(self) -> dict[str, object]:
        """The signals, and the number of blocks that each one's rule would freeze."""
        before, norms = (np.mean(self._norms[late], axis=0) for late in (False, True))
        even, odd = self._halves
        products = self._by_block({name: (even[name] * odd[name]).sum() for name in even})
        sizes = [np.sqrt(self._by_block({n: g.square().sum() for n, g in half.items()})) for half in (even, odd)]
        cosines = products / (sizes[0] * sizes[1])
        first, now = (
            [rules.similarity_change(a, b) for a, b in zip(self._features[late], self._features[early])]
            for early, late in ((0, FIRST), (FIRST, LAST))
        )
        depths = {
            "norm": rules.by_norm(norms),
            "change of norm": rules.by_change(norms, before),
            "agreement": rules.by_agreement(cosines),
            "progress per cost": rules.by_progress(self._progress),
            "plasticity": rules.by_plasticity(first, now),
        }
        values = {
            "norm": norms,
            "norm before": before,
            "agreement": cosines,
            "progress": self._progress,
            "plasticity": np.array(now),
            "plasticity at first": np.array(first),
        }
        return {"depths": depths, "values": {name: each.tolist() for name, each in values.items()}}


def main(config_path: str, result: str, overrides: list[str]) -> None:
    config = load_config(config_path, overrides)
    world, signals = init_world(timeout_seconds=600), Signals()
    signals.trainer = trainer = Trainer(config, world, probe=signals.note)
    chain, rows = trainer.job.chain, config.train.batch_size
    scores = boundary_scores(chain, trainer.job.datasets["train"], world=world, rows=rows)
    with contextlib.suppress(_Enough):
        trainer.run()
    told = signals.told()
    free = 0 if scores is None else free_blocks(scores, num_blocks=chain.num_blocks, is_pretrained=True)
    whole = {**told, "depths": {**told["depths"], "linear probe": free}, "scores": scores}  # type: ignore[dict-item]
    Path(result).write_text(json.dumps(whole))
    close_world()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
