"""How the units of a chain are numbered, and which block each belongs to: with p units a block,

    unit   0     1 .. p     p + 1 .. 2 p   ...   L p + 1
    part   0     1          2              ...   L + 1
           stem  block 0    block 1              head

A block is one unit, or two: its attention half and its MLP half, each with its residual. Pipelines are cut between
units; freezing and the cache count in blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Numbering"]


@dataclass(frozen=True, slots=True)
class Numbering:
    """The units of a chain of ``num_blocks`` blocks (L)."""

    num_blocks: int
    units_per_block: int = 1

    @classmethod
    def of(cls, *, num_blocks: int, num_units: int) -> Numbering:
        """That of ``num_blocks`` blocks in ``num_units`` units, stem and head included."""
        numbering = cls(num_blocks, (num_units - 2) // num_blocks)
        assert numbering.num_units == num_units, f"{num_blocks} blocks are not in {num_units} units"
        return numbering

    @property
    def num_units(self) -> int:
        return self.num_blocks * self.units_per_block + 2

    def behind(self, blocks: int) -> int:
        """The first unit behind the first ``blocks`` blocks; 0 for none of them, because the stem goes with block 0."""
        return self.first_of(blocks + 1) if blocks else 0

    def part_of(self, unit: int) -> int:
        """0 for the stem, i + 1 for block i, L + 1 for the head."""
        return (unit - 1) // self.units_per_block + 1

    def first_of(self, part: int) -> int:
        """The first unit of a part."""
        return (part - 1) * self.units_per_block + 1 if part else 0
