"""The immutable answer to "who holds what, and how is a batch cut": what the controllers pass to each other.

Units are numbered along the chain (``numbering.py``). With ``frozen`` blocks, theirs and the stem form the prefix (no
unit for frozen = 0) and the rest are cut into contiguous stages, one or more a rank.
Ranks are laid out with pp innermost: rank = replica * pp + place, and the rank at ``place`` of a pipeline holds the
stages place, place + pp, place + 2 pp, ...
"""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, replace

from pipetransformer.plan.schedules import SCHEDULES, why_not
from pipetransformer.plan.units import Numbering

__all__ = ["ParallelPlan"]


@dataclass(frozen=True, slots=True)
class ParallelPlan:
    """One layout of the job.

    Attributes:
        frozen: leading blocks that are frozen (n); the stem freezes with the first.
        pp: pipeline length. dp: number of pipeline replicas. pp * dp is the world size.
        boundaries: first unit of every stage but the first, strictly increasing.
        num_microbatches: micro-batches per pipeline and step (M).
        schedule: one of ``schedules.SCHEDULES`` (means nothing at pp = 1, which is a plain loop).
        cached: boundary (in blocks, <= frozen) whose activations are read from the cache; None computes the prefix
            from the inputs.
        num_blocks: L, the number of blocks of the model.
        stages_per_rank: v, above 1 only under ``interleaved`` (which needs it) and ``zero_bubble``.
        units_per_block: 1, or 2 where blocks may be cut in halves.
    """

    frozen: int
    pp: int
    dp: int
    boundaries: tuple[int, ...]
    num_microbatches: int
    schedule: str
    cached: int | None
    num_blocks: int
    stages_per_rank: int = 1
    units_per_block: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.frozen <= self.num_blocks, self
        assert len(self.boundaries) == self.num_stages - 1, self
        cuts = self.cuts
        assert all(a < b for a, b in zip(cuts, cuts[1:])), self
        assert self.cached is None or 0 < self.cached <= self.frozen, self
        assert self.num_microbatches >= 1, self
        assert self.schedule in SCHEDULES, self
        v, num_microbatches = self.stages_per_rank, self.num_microbatches
        if self.pp == 1:
            assert v == 1, self
        else:
            reason = why_not(self.schedule, num_ranks=self.pp, num_microbatches=num_microbatches, stages_per_rank=v)
            assert reason is None, f"schedule {self.schedule} {reason}: {self}"

    @property
    def num_stages(self) -> int:
        """Stages of a pipeline, all ranks together."""
        return self.pp * self.stages_per_rank

    @property
    def numbering(self) -> Numbering:
        return Numbering(self.num_blocks, self.units_per_block)

    @property
    def num_units(self) -> int:
        return self.numbering.num_units

    @property
    def first_computed(self) -> int:
        """The first unit that a step computes: what comes before it is read from the cache."""
        return self.numbering.behind(self.cached or 0)

    @property
    def first_active(self) -> int:
        """The first unit that trains: what comes before it is the prefix."""
        return self.numbering.behind(self.frozen)

    @property
    def cuts(self) -> tuple[int, ...]:
        """Stage s holds the units cuts[s] .. cuts[s + 1] - 1."""
        return (self.first_active, *self.boundaries, self.num_units)

    @property
    def world_size(self) -> int:
        return self.pp * self.dp

    def stage_of(self, rank: int) -> int:
        """The first stage that ``rank`` holds, which is its place in its pipeline."""
        return rank % self.pp

    def stages_of(self, rank: int) -> range:
        """The stages that ``rank`` holds, in order."""
        return range(rank % self.pp, self.num_stages, self.pp)

    def replica_of(self, rank: int) -> int:
        return rank // self.pp

    def stage_units(self, stage: int) -> range:
        return range(self.cuts[stage], self.cuts[stage + 1])

    def active_units_of(self, rank: int) -> tuple[range, ...]:
        """The units of each stage that ``rank`` holds."""
        return tuple(map(self.stage_units, self.stages_of(rank)))

    def units_of(self, rank: int) -> tuple[int, ...]:
        """All units that ``rank`` trains, in order."""
        return tuple(unit for units in self.active_units_of(rank) for unit in units)

    def ranks_by_unit(self) -> dict[int, frozenset[int]]:
        """The ranks that train each active unit."""
        return {
            unit: frozenset(range(stage % self.pp, self.world_size, self.pp))
            for stage in range(self.num_stages)
            for unit in self.stage_units(stage)
        }

    def renumbered(self, units_per_block: int) -> ParallelPlan | None:
        """The same layout in other units; None where it cuts a block that would be one unit."""
        if units_per_block == self.units_per_block:
            return self
        old, new = self.numbering, Numbering(self.num_blocks, units_per_block)
        parts = [old.part_of(unit) for unit in self.boundaries]
        if tuple(map(old.first_of, parts)) != self.boundaries:
            return None
        return replace(self, boundaries=tuple(map(new.first_of, parts)), units_per_block=units_per_block)

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "boundaries": list(self.boundaries)}

    @classmethod
    def from_dict(cls, fields: dict[str, object]) -> ParallelPlan:
        """The inverse of ``as_dict``. A field that has a default may be missing, as in events of older versions.

        Raises KeyError, TypeError or AssertionError where ``fields`` are no plan.
        """
        required = {name for name, known in cls.__dataclass_fields__.items() if known.default is MISSING}
        values = {name: fields[name] for name in cls.__dataclass_fields__ if name in fields or name in required}
        return cls(**{**values, "boundaries": tuple(values["boundaries"])})  # type: ignore[arg-type]
