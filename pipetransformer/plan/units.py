"""The numbering of a chain's units, and the part (stem, block or head) of each. With p units per block:

    unit   0     1 .. p     p + 1 .. 2 p   ...   L p + 1
    part   0     1          2              ...   L + 1
           stem  block 0    block 1              head

A block is one unit, or two: its attention half and its MLP half, each with its residual. A pipeline is cut between
units. Freezing and the cache count in blocks.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Numbering:
    """The numbering of the units of a chain.

    Attributes:
        num_blocks: number of blocks (L).
        units_per_block: units of each block (p), 1 or 2.
    """

    num_blocks: int
    units_per_block: int = 1

    @classmethod
    def of(cls, *, num_blocks: int, num_units: int) -> Numbering:
        """The numbering of ``num_blocks`` blocks in ``num_units`` units, stem and head included.

        Raises:
            AssertionError: if the blocks cannot share out the units evenly.
        """
        numbering = cls(num_blocks, (num_units - 2) // num_blocks)
        assert numbering.num_units == num_units, f"{num_blocks} blocks are not in {num_units} units"
        return numbering

    @property
    def num_units(self) -> int:
        """Number of units, stem and head included."""
        return self.num_blocks * self.units_per_block + 2

    def behind(self, blocks: int) -> int:
        """The first unit behind the first ``blocks`` blocks. It is 0 for no blocks: the stem freezes with block 0."""
        return self.first_of(blocks + 1) if blocks else 0

    def part_of(self, unit: int) -> int:
        """The part of ``unit``: 0 for the stem, i + 1 for block i, L + 1 for the head."""
        return (unit - 1) // self.units_per_block + 1

    def first_of(self, part: int) -> int:
        """The first unit of ``part``."""
        return (part - 1) * self.units_per_block + 1 if part else 0
