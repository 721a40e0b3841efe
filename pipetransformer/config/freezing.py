"""The keys of ``freeze``."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Le
from pydantic import AfterValidator, Field, JsonValue

from pipetransformer.config.policies import POLICIES
from pipetransformer.config.quantities import Interval
from pipetransformer.config.types import Count, CountOrZero, Every, OpenShare, Percent, Section, Warmup
from pipetransformer.config.words import Allowed


class FreezeConfig(Section):
    policy: Annotated[str, AfterValidator(POLICIES.known), POLICIES] = Field(
        default="none",
        description="How many leading blocks are frozen (n of L). `static`: `max_frozen`, once warm-up is over. "
        "`schedule`: ceil(L (1 - (1 - alpha)^T)) at decision T. `paper`: the least of n + alpha (L - n) and the block "
        "of smallest gradient norm. `percentile`: the blocks in front of the first one whose gradient norm still "
        "changes. `plasticity`: the leading blocks whose outputs have settled; all thaw when the learning rate has "
        "fallen to a tenth. `top_down`: `max_frozen` or all but a sixth, a sixth fewer at each decision. `guarded`: "
        "where a linear probe shows that the blocks hold a quarter of the task, a third of them, and more later; "
        "elsewhere none at first, and in the last twentieth of the learning rates' sum some, where that pays and the "
        "guard keeps it. "
        "`none`: no block, ever. `package.module:Class`: your own, found from the working directory too "
        "(see [extending.md](extending.md)).",
    )
    options: Annotated[dict[str, JsonValue], Allowed("a mapping of names to plain values")] = Field(
        default_factory=dict, description="Options of a `package.module:Class`, which checks them itself."
    )
    alpha: OpenShare = Field(default=0.5, description="Share of the active blocks to freeze at a decision.")
    percentile: Percent = Field(
        default=50.0, description="A block still changes at or above this percentile of all active blocks' changes."
    )
    settled: OpenShare = Field(
        default=0.2,
        description="A block has settled where its outputs change by less than this share of the most that they did.",
    )
    every: Every | Literal["auto"] = Field(
        default="auto",
        description="Time between decisions; `auto`: an epoch; under `guarded` an eighth of one, or the time between "
        "two looks of the guard, at least 50 steps, if the run is long enough for it.",
    )
    warmup: Warmup = Field(default=Interval(0, "step"), description="Time before the first decision counts.")
    max_frozen: CountOrZero | None = Field(
        default=None, description="No more blocks than this freeze; null sets no cap."
    )
    stem: bool = Field(
        default=False,
        description="Freeze the embeddings alone from the first step, under every policy, `none` too; n still counts "
        "blocks.",
    )
    guard: bool = Field(
        default=True,
        description="Set training samples aside, at most a tenth and 1,000, and undo a freeze by which their loss "
        "rises. Never under policy `none`, always under `guarded`, and not in a run of too few steps to judge any; "
        "`false` is what the papers do.",
    )
    guard_samples: Annotated[int, Ge(2), Le(1000)] | Literal["auto", "none"] = Field(
        default="auto",
        description="The training samples that the guard sets aside, at most a tenth; the more, the rarer it looks, so "
        "that its passes cost little. `auto`: one of 160, and at least 64, as far as these are no more than a tenth "
        "and 1,000. `none`: none, and no freeze is judged. A resumed run keeps its own; one that was too short for a "
        "guard has none then, too.",
    )
    probe: bool = Field(
        default=False,
        description="Before training, a linear head at every boundary, by a share of the training samples: tells how "
        "much of the task the blocks compute already, and with how many frozen ones to start.",
    )
    averaged: bool | Literal["auto"] = Field(
        default="auto",
        description="Whether a block freezes with a moving average of the weights that it had in the last steps, as if "
        "its learning rate had fallen first, in place of its last ones, as published. Takes the memory of the weights "
        "once more. `auto`: under `guarded`.",
    )
    patience: Count = Field(
        default=1, description="A block freezes or thaws only where so many decisions in a row agree (hysteresis)."
    )

    @property
    def is_averaged(self) -> bool:
        """Whether blocks freeze with the average of their last weights."""
        return self.policy == "guarded" if self.averaged == "auto" else self.averaged

    @property
    def is_guarded(self) -> bool:
        """Whether samples are set aside for the guard: policy ``guarded`` is nothing without it."""
        return self.policy == "guarded" or (self.guard and self.policy != "none")
