"""The plan: the units of each rank, and the cut of a batch. The controllers pass it to each other.

Units are numbered along the chain (``plan/units.py``). With n frozen blocks, the stem and the units of these blocks are
the prefix; for n = 0 the prefix is empty, or the stem alone. The other units are active. They are cut into contiguous
stages, one or more for each rank of a pipeline.

Ranks are laid out with pp innermost: rank = replica * pp + place. The rank at ``place`` of a pipeline holds the stages
place, place + pp, place + 2 pp, ...
"""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, replace
from itertools import pairwise

from pipetransformer.plan.schedules import SCHEDULES, Order, orders, why_not
from pipetransformer.plan.units import Numbering

SHARDS = ("none", "optimizer", "full")
"""What replicas share out: nothing, so that each has all; optimizer state, of which each unit's is on one of the
replicas; or weights and gradients with it, which the others borrow and give away."""
PREFIXES = ("replicated", "cached", "streamed", "in_place")
"""Places of the weights of the prefix: on every rank; where all that it computes is in the cache, on no device but for
the time of an advance pass, all units of the pass at once (cached) or one block after another (streamed); or in the
stages of a pipeline, which run their forward alone."""


@dataclass(frozen=True, slots=True)
class ParallelPlan:
    """One layout of the job.

    Attributes:
        frozen: number of frozen leading blocks (n). The stem freezes with the first of them.
        pp: pipeline length, in ranks.
        dp: number of pipeline replicas; pp * dp is the world size.
        boundaries: first unit of every stage but the first [num_stages - 1], strictly increasing.
        num_microbatches: micro-batches per pipeline and step (M).
        schedule: one of ``schedules.SCHEDULES``; without meaning at pp = 1, which is a plain loop.
        cached: boundary of the activations in the cache, in blocks (1 .. n); None for a prefix computed in the step.
        num_blocks: number of blocks of the model (L).
        stages_per_rank: stages of each rank (v). ``interleaved`` needs 2 or more, ``zero_bubble`` takes any number, the
            other schedules take 1.
        units_per_block: 1, or 2 for blocks that may be cut into halves.
        stem_frozen: whether the stem is frozen at n = 0 too.
        prefix: the place of the weights of the prefix, one of ``PREFIXES``.
        shard: what the replicas share out, one of ``SHARDS``.

    Raises:
        AssertionError: for fields that contradict each other.
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
    stem_frozen: bool = False
    prefix: str = "replicated"
    shard: str = "none"

    def __post_init__(self) -> None:
        assert self.prefix in PREFIXES and self.shard in SHARDS, self
        if self.prefix == "in_place":  # Note: a backward that is split asks each unit for gradients.
            assert self.cached is None and self.run_schedule != "zero_bubble", self
        else:
            assert self.prefix == "replicated" or self.cached == self.frozen, self
        # Note: half a backward borrows no weights again.
        assert not (self.shard == "full" and self.shares_state and self.run_schedule == "zero_bubble"), self
        assert 0 <= self.frozen <= self.num_blocks, self
        assert len(self.boundaries) == self.num_stages - 1, self
        assert all(a < b for a, b in pairwise(self.cuts)), self
        assert self.cached is None or 0 < self.cached <= self.frozen, self
        assert self.num_microbatches >= 1, self
        assert self.schedule in SCHEDULES, self
        assert self.pp > 1 or self.stages_per_rank == 1, self
        reason = why_not(self.run_schedule, **self._numbers)
        assert reason is None, f"schedule {self.schedule} {reason}: {self}"

    @property
    def _numbers(self) -> dict[str, int]:
        """The numbers that a schedule's order depends on."""
        return {
            "num_ranks": self.pp,
            "num_microbatches": self.num_microbatches,
            "stages_per_rank": self.stages_per_rank,
        }

    @property
    def run_schedule(self) -> str:
        """The schedule that runs. In a plain loop, the backward of each micro-batch follows its forward."""
        return self.schedule if self.pp > 1 else "1f1b"

    @property
    def num_stages(self) -> int:
        """Number of stages of a pipeline, over all its ranks."""
        return self.pp * self.stages_per_rank

    @property
    def numbering(self) -> Numbering:
        """The numbering of the units that this plan counts in."""
        return Numbering(self.num_blocks, self.units_per_block)

    @property
    def num_units(self) -> int:
        """Number of units of the chain, stem and head included."""
        return self.numbering.num_units

    @property
    def first_computed(self) -> int:
        """The first unit that a step computes. The result of the units before it is read from the cache."""
        return self.numbering.behind(self.cached or 0)

    @property
    def first_active(self) -> int:
        """The first unit that trains. The units before it are the prefix."""
        return max(self.numbering.behind(self.frozen), int(self.stem_frozen))

    @property
    def first_staged(self) -> int:
        """The first unit of the first stage."""
        return 0 if self.prefix == "in_place" else self.first_active

    @property
    def keeps_prefix(self) -> bool:
        """Whether every rank holds the weights of the prefix."""
        return self.prefix == "replicated"

    @property
    def cuts(self) -> tuple[int, ...]:
        """Ends of all stages [num_stages + 1]: stage s holds the units cuts[s] .. cuts[s + 1] - 1."""
        return (self.first_staged, *self.boundaries, self.num_units)

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return self.pp * self.dp

    def stage_of(self, rank: int) -> int:
        """The first stage of ``rank``, which is also its place in its pipeline."""
        return rank % self.pp

    def stages_of(self, rank: int) -> range:
        """The stages of ``rank``, in order."""
        return range(rank % self.pp, self.num_stages, self.pp)

    def replica_of(self, rank: int) -> int:
        """The number of the pipeline that ``rank`` belongs to, from 0."""
        return rank // self.pp

    def stage_units(self, stage: int) -> range:
        """The units of ``stage``."""
        return range(self.cuts[stage], self.cuts[stage + 1])

    def staged_units_of(self, rank: int) -> tuple[range, ...]:
        """The units of ``rank``, as one range for each of its stages."""
        return tuple(map(self.stage_units, self.stages_of(rank)))

    def units_of(self, rank: int) -> tuple[int, ...]:
        """The active units of ``rank``, in order."""
        return tuple(unit for units in self.staged_units_of(rank) for unit in units if unit >= self.first_active)

    def orders(self) -> list[Order]:
        """The work of each rank of a pipeline, in order."""
        return orders(self.run_schedule, **self._numbers)

    def ranks_by_unit(self) -> dict[int, range]:
        """The ranks of each active unit: those that train it."""
        return {unit: ranks for unit, ranks in self._staged().items() if unit >= self.first_active}

    def state_ranks(self) -> dict[int, range]:
        """The ranks that have the optimizer state of each active unit, and update its weights."""
        found = self.ranks_by_unit()
        for place in range(self.pp) if self.shares_state else ():
            for replica, units in enumerate(self.units_of_replicas(place)):
                owner = replica * self.pp + place
                found |= dict.fromkeys(units, range(owner, owner + 1))
        return found

    def units_of_replicas(self, place: int) -> list[tuple[int, ...]]:
        """The units at a place of the pipeline that each replica updates alone, where they share out [dp].

        They take turns from the head on, so that a freeze of leading units leaves the others with their owners.
        """
        backwards = self.units_of(place)[::-1]
        return [backwards[replica :: self.dp] for replica in range(self.dp)]

    @property
    def shares_state(self) -> bool:
        """Whether a rank updates only a part of the weights that it trains."""
        return self.shard != "none" and self.dp > 1

    def holders(self) -> dict[int, range]:
        """The ranks that have the weights of each unit that is in use."""
        prefix = range(self.first_active if self.keeps_prefix else 0)
        of_one = self.state_ranks() if self.shard == "full" else {}
        return {**dict.fromkeys(prefix, range(self.world_size)), **self._staged(), **of_one}

    def _staged(self) -> dict[int, range]:
        """The ranks whose stages have each unit."""
        return {
            unit: range(stage % self.pp, self.world_size, self.pp)
            for stage in range(self.num_stages)
            for unit in self.stage_units(stage)
        }

    def sharing(self, shard: str) -> ParallelPlan:
        """The same layout, where replicas share out as ``shard`` says; itself where its schedule does not allow it."""
        halves = shard == "full" and self.dp > 1 and self.run_schedule == "zero_bubble"
        return self if halves or shard == self.shard else replace(self, shard=shard)

    def cached_before(self, boundary: int | None) -> ParallelPlan:
        """The same with another boundary of the cache, in blocks; None for no cache. The rest of the prefix is computed
        in each step, on every rank."""
        return replace(self, cached=boundary, prefix="replicated")

    def renumbered(self, units_per_block: int) -> ParallelPlan | None:
        """The same layout with another number of units per block; None where it cuts a block that would be one unit."""
        if units_per_block == self.units_per_block:
            return self
        old, new = self.numbering, Numbering(self.num_blocks, units_per_block)
        parts = [old.part_of(unit) for unit in self.boundaries]
        if tuple(map(old.first_of, parts)) != self.boundaries:
            return None
        return replace(self, boundaries=tuple(map(new.first_of, parts)), units_per_block=units_per_block)

    def as_dict(self) -> dict[str, object]:
        """The fields by name, in types that JSON can hold."""
        return {**asdict(self), "boundaries": list(self.boundaries)}

    @classmethod
    def from_dict(cls, fields: dict[str, object]) -> ParallelPlan:
        """The inverse of ``as_dict``. A field with a default may be missing, as in events of older versions.

        Raises:
            KeyError: for a missing field.
            TypeError: for a value of a wrong type.
            AssertionError: for fields that contradict each other.
        """
        required = {name for name, known in cls.__dataclass_fields__.items() if known.default is MISSING}
        values = {name: fields[name] for name in cls.__dataclass_fields__ if name in fields or name in required}
        return cls(**{**values, "boundaries": tuple(values["boundaries"])})  # type: ignore[arg-type]
