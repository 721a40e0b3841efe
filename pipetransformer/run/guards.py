"""Guards against a loss or weights that are not finite: they stop the job at the first such step, on every rank."""

from __future__ import annotations

from dataclasses import dataclass

from pipetransformer.engine import Engine, NotFinite, are_finite
from pipetransformer.errors import UserError
from pipetransformer.process.agreement import agree_by_name
from pipetransformer.process.collectives import first_of_ranks
from pipetransformer.run.checkpoint import CheckpointStore

_MOST_SKIPPED = 20


@dataclass(frozen=True, slots=True)
class Guards:
    """Checks losses and weights. All methods raise UserError, which names step, rank and remedy.

    Attributes:
        engine: the engine; its objective notes the first step with a loss that is not finite.
        rank: this rank.
        checkpoints: the checkpoints of the run; an error names the last one.
    """

    engine: Engine
    rank: int
    checkpoints: CheckpointStore

    def check_loss(self) -> None:
        """Stops this rank if one of its losses was not finite."""
        bad = self.engine.objective.first_bad_step
        if bad >= 0:
            raise self._diverged(bad, rank=self.rank, what="the loss is not finite")

    def check_losses(self) -> None:
        """Collective. Stops all ranks if a loss was not finite on any rank: its gradients have reached all ranks."""
        bad = self.engine.objective.first_bad_step
        self._stop_all(bad if bad >= 0 else None, what="the loss is not finite")

    def check_skipped(self, number: int, *, last_step: int) -> None:
        """Stops this rank, as all others, if too many updates in a row were skipped."""
        if number >= _MOST_SKIPPED:
            raise self._diverged(last_step, rank=self.rank, what=f"{number} updates in a row were not finite")

    def check_weights(self, *, last_step: int) -> None:
        """Collective. Stops all ranks if weights are not finite, before they are used or saved.

        Args:
            last_step: number of the last step, from 0, whose update made the weights.
        """
        parameters = self.engine.layout.updated.values()  # none where all units are frozen in place
        finite = are_finite([parameter.detach() for parameter in parameters])
        self._stop_all(None if finite else last_step, what="the update made weights that are not finite")

    def compare_replicas(self, *, step: int) -> None:
        """Collective. Raises Disagreement where a unit that replicas hold is not the same, to the bit, on all of them.

        Args:
            step: number of steps done.
        """
        digests, group = self.engine.weight_digests(), self.engine.layout.mesh.dp_group
        agree_by_name("weights", digests, group=group, step=step)

    def evaluate(self, *, last_step: int) -> dict[str, float]:
        """Collective. The metrics of an evaluation by name. Stops all ranks if a loss is not finite.

        Args:
            last_step: number of the last step, from 0.
        """
        try:
            return self.engine.evaluate()
        except NotFinite as error:
            raise self._diverged(last_step, rank=error.rank, what="the evaluation loss is not finite") from None

    def _stop_all(self, bad_step: int | None, *, what: str) -> None:
        """Collective. Stops all ranks if any rank gives a bad step."""
        if (found := first_of_ranks(bad_step)) is not None:
            raise self._diverged(found[0], rank=found[1], what=what)

    def _diverged(self, step: int, *, rank: int, what: str) -> UserError:
        latest = self.checkpoints.latest()
        good = f"the last good checkpoint is {latest}" if latest else "there is no checkpoint"
        return UserError(f"step {step}, rank {rank}: {what}; {good}; lower train.lr, or set train.max_grad_norm")
