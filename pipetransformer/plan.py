"""The immutable answer to "who holds what, and how is a batch cut": what the controllers pass to each other.

Units are numbered along the chain: 0 is the stem, 1..L are the blocks, L + 1 is the head. With ``frozen`` blocks,
units 0..frozen form the prefix (none for frozen = 0) and the rest are cut into ``pp`` contiguous stages.
Ranks are laid out with pp innermost: rank = replica * pp + stage.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

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
        boundaries: first unit of stages 1..pp-1, strictly increasing.
        num_microbatches: micro-batches per pipeline and step (M).
        schedule: ``gpipe`` or ``1f1b`` (means nothing at pp = 1).
        cached: boundary (in blocks, <= frozen) whose activations are read from the cache; None computes the prefix
            from the inputs.
        num_blocks: L, the number of blocks of the model.
    """

    frozen: int
    pp: int
    dp: int
    boundaries: tuple[int, ...]
    num_microbatches: int
    schedule: str
    cached: int | None
    num_blocks: int

    def __post_init__(self) -> None:
        assert 0 <= self.frozen <= self.num_blocks, self
        assert len(self.boundaries) == self.pp - 1, self
        cuts = self.cuts
        assert all(a < b for a, b in zip(cuts, cuts[1:])), self
        assert self.cached is None or 0 < self.cached <= self.frozen, self
        assert self.num_microbatches >= 1, self
        assert self.schedule != "1f1b" or self.num_microbatches >= self.pp, self

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
        return rank % self.pp

    def replica_of(self, rank: int) -> int:
        return rank // self.pp

    def stage_units(self, stage: int) -> range:
        return range(self.cuts[stage], self.cuts[stage + 1])

    def active_units_of(self, rank: int) -> range:
        return self.stage_units(self.stage_of(rank))

    def ranks_by_unit(self) -> dict[int, frozenset[int]]:
        """The ranks that train each active unit."""
        return {
            unit: frozenset(range(stage, self.world_size, self.pp))
            for stage in range(self.pp)
            for unit in self.stage_units(stage)
        }

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "boundaries": list(self.boundaries)}

    @classmethod
    def from_dict(cls, fields: dict[str, object]) -> ParallelPlan:
        """The inverse of ``as_dict``. Raises KeyError or TypeError where a field is missing."""
        names = cls.__dataclass_fields__
        values = {name: fields[name] for name in names}
        return cls(**{**values, "boundaries": tuple(values["boundaries"])})  # type: ignore[arg-type]
