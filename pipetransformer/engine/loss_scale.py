"""Loss scaling for float16 (Micikevicius et al., "Mixed precision training", arXiv 1710.03740, section 3.2): the loss
is multiplied, so that small gradients are no zeros, and the gradients divided before anything reads them.

torch's own GradScaler knows the gradients of one process alone. The stages of a pipeline must skip a step together.
"""

from __future__ import annotations

_FIRST, _MOST = 2.0**16, 2.0**24
_FEWEST_GOOD = 2000  # steps before it grows; this and the first are torch's own


class LossScale:
    """The factor of the loss.

    Attributes:
        factor: a power of 2.
    """

    def __init__(self) -> None:
        self.factor = _FIRST
        self._num_good = 0

    def passed(self) -> None:
        """Takes note of a step whose gradients were finite."""
        self._num_good += 1
        if self._num_good >= _FEWEST_GOOD:
            self.factor, self._num_good = min(2 * self.factor, _MOST), 0

    def overflowed(self) -> None:
        """Takes note of a step that was skipped."""
        self.factor, self._num_good = max(self.factor / 2, 1.0), 0

    def state_dict(self) -> dict[str, float]:
        return {"factor": self.factor, "num_good": self._num_good}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.factor, self._num_good = float(state["factor"]), int(state["num_good"])
