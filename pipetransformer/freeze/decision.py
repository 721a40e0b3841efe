"""An answer of AutoFreeze, with its evidence."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FreezeDecision:
    """One answer with its evidence.

    Attributes:
        step: optimizer steps done when it was taken.
        interval: intervals since the warm-up (T).
        frozen: the wanted number of frozen blocks (n).
        asked: the number that the policy asks for; None where the guard alone was due.
        norms: mean gradient norm of every block over the interval; None if there is none.
        plasticity: of every block; None for a policy that needs none.
        payoffs: (frozen blocks, predicted seconds saved, seconds spent) for each number that the policy asked about.
        reason: the reason for another number than the policy's, in words; empty for none.
        to_come: share of the sum of all learning rates that lies ahead; None where it is not known.
    """

    step: int
    interval: int
    frozen: int
    asked: int | None
    norms: tuple[float, ...] | None
    payoffs: tuple[tuple[int, float, float], ...] = ()
    plasticity: tuple[float | None, ...] | None = None
    reason: str = ""
    to_come: float | None = None

    def cause(self, policy: str, *, before: int, settled: int) -> str:
        """Who takes the number from ``before`` to ``settled``: the policy of this name, the guard or
        ``model.lora.blocks``; where it stays, "measured", because measurements have changed the plan.
        """
        if settled == before:
            return "measured"
        if self.reason and self.frozen < before:
            return "guard"
        return policy if self.asked is not None else "model.lora.blocks"
