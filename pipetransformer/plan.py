"""The immutable answer to "who holds what, and how is a batch cut": what the controllers pass to each other.

Units are numbered along the chain: 0 is the stem, 1..L are the blocks, L + 1 is the head. With ``frozen`` blocks,
units 0..frozen form the prefix (none for frozen = 0) and the rest are cut into contiguous stages, one or more a rank.
Ranks are laid out with pp innermost: rank = replica * pp + place, and the rank at ``place`` of a pipeline holds the
stages place, place + pp, place + 2 pp, ...
"""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass

from pipetransformer.schedules import SCHEDULES, admits

__all__ = ["ParallelPlan", "first_active"]


def first_active(frozen: int) -> int:
    """The first unit that trains with ``frozen`` frozen blocks: the stem freezes with block 0."""
    return frozen + 1 if frozen else 0


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
            assert admits(self.schedule, num_ranks=self.pp, num_microbatches=num_microbatches, stages_per_rank=v), self

    @property
    def num_stages(self) -> int:
        """Stages of a pipeline, all ranks together."""
        return self.pp * self.stages_per_rank

    @property
    def num_units(self) -> int:
        return self.num_blocks + 2

    @property
    def first_active(self) -> int:
        """The first unit that trains: what comes before it is the prefix."""
        return first_active(self.frozen)

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
