"""The rule that binds figures on pages to files under ``benchmarks/results/``.

By section of a page (from a heading to the next):

- A section with figures names the files of them, as ``benchmarks/results/NAME.json``.
- A row of a table: all its numbers stand in one row of one file, one that holds every word of its first cell
  ("one / other": in these two together). A ratio of two rows is a figure of the file too, written by its benchmark.
- A column whose head says "published" or "FTPipe" shows what stands under such a name in the file, and no other does.
- ``a [b .. c]`` is the median, the least and the most of one list.
- Prose: a number with a decimal point, or with a unit, stands in title or notes of a file of its section, or in the
  rows of a file that has few numbers (``FEW_NUMBERS``): in a large one any number would.
- A number stands in a row if one of the row's numbers, rounded as shown, is it; of a list, one of up to eight values,
  the least, the median or the most. Texts hold numbers too. Seconds are also ms, bytes MB, shares per cent (``UNITS``:
  the unit stands behind the number or in the column's head).
- ``<!-- no file: 1.1 (SQuAD's version) 2.15 (torch's) -->`` in a section lets numbers be that nobody measured;
  ``no file: all (reason)`` a whole section.
- Sections that name no file hold no number with a unit and no cell that is a decimal number; on pages of measurements
  (``measured``) the whole rule holds in all of them.
- ``code``, "quotes" and what letters touch (1F1B, 4x1, GPT-2, v0.0.7) are no figures.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

FEW_VALUES, FEW_NUMBERS = 8, 200
UNITS: dict[str, tuple[float, ...]] = {  # what a value of a file may be multiplied with
    "%": (100,), "per cent": (100,), "points": (100,), "ms": (1e3,), "s": (1e-3,), "seconds": (1e-3,), "/s": (),
    "minutes": (1 / 60,), "KB": (1e-3,), "MB": (1e-6,), "GB": (1e-9, 1e-3), "KiB": (2**-10,), "MiB": (2**-20,),
    "GiB": (2**-30, 2**-10), "M parameters": (1e-6,), "bytes": (), "times": (), "x": (),
}  # fmt: skip
_UNIT = "|".join(sorted(map(re.escape, UNITS.keys() - {"x"}), key=len, reverse=True))
_NUMBER = re.compile(
    r"(?<![\w.])(?<![\w.]-)(-?\d{1,3}(?:,\d{3})+(?:\.\d+)?|-?\d+(?:\.\d+)?(?:e-?\d+)?)(?!\d|\.\d|,\d{3})"
    rf"(?:\s?({_UNIT})(?!\w)|(x)(?!\w)|\s?\w+(/s)(?!\w)|(?!\w))"
)
_NO_FIGURE = re.compile(r'`[^`\n]*`|"[^"\n]*"|\]\([^)]*\)|https?://\S+|<!--.*?-->', re.DOTALL)
_SPREAD = re.compile(r"(-?[\d,.]+) \[(-?[\d,.]+) \.\. (-?[\d,.]+)\]")
_PUBLISHED = re.compile(r"published|FTPipe", re.IGNORECASE)
_MARK = re.compile(r"<!-- no file: (.*?) -->", re.DOTALL)


@dataclass(frozen=True)
class Number:
    """As shown."""

    text: str
    unit: str | None

    @cached_property
    def bounds(self) -> list[tuple[float, float]]:
        """Of a file's values that this is, rounded."""
        digits = self.text.replace(",", "")
        shown = float(digits)
        half = 0.5 * 10.0 ** -len(digits.partition(".")[2]) if "e" not in digits else 0.05 * abs(shown)
        factors = (1.0, *UNITS.get(self.unit or "", ()))
        return [((shown - half * 1.000001) / factor, (shown + half * 1.000001) / factor) for factor in factors]

    def stands_in(self, values: Sequence[float]) -> bool:
        return any(low <= value <= high for low, high in self.bounds for value in values)


@dataclass(frozen=True)
class Record:
    """A row of a file.

    Attributes:
        numbers: of the machine that measured it. published: of the original that stands beside.
        spreads: median, least and most of its lists.
        words: of its names and texts, and its whole numbers.
    """

    numbers: tuple[float, ...]
    published: tuple[float, ...]
    spreads: tuple[tuple[float, float, float], ...]
    words: frozenset[str]

    def lacks(self, cell: str, *, head: str, allowed: Sequence[str]) -> list[str]:
        """Numbers of a cell that are not this row's."""
        found = [number for number in numbers_of(cell, head=head) if number.text not in allowed]
        values = self.published if _PUBLISHED.search(head) else self.numbers
        lacking = [number.text for number in found if not number.stands_in(values)]
        unit = next((number.unit for number in found if number.unit), None)
        for three in _SPREAD.findall(cell):
            shown = [Number(text, unit) for text in three]
            if not any(all(n.stands_in([value]) for n, value in zip(shown, spread)) for spread in self.spreads):
                lacking += [text for text in three if text not in lacking]
        return lacking


def numbers_of(text: str, *, head: str | None = None) -> list[Number]:
    """Of a text without code; in a cell, those without a unit take the first of the cell, or that of its column."""
    found = [(digits, unit or times or rate) for digits, unit, times, rate in _NUMBER.findall(text)]
    if head is None:
        return [Number(digits, unit or None) for digits, unit in found]
    above = (unit for unit in UNITS if re.search(rf"(?<!\w){re.escape(unit)}(?!\w)", head))
    shared = next(filter(None, [*(unit for _, unit in found), *above]), None)
    return [Number(digits, unit or shared) for digits, unit in found]


def words_of(text: str) -> frozenset[str]:
    """Between spaces, in small letters, without signs: "GPT-2," is gpt2."""
    words = (re.sub(r"[^\w.]|_", "", word).strip(".") for word in text.lower().split())
    return frozenset(filter(None, words))


def values_of(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        for each in value.values():
            yield from values_of(each)
    elif isinstance(value, list) and value and all(isinstance(each, (int, float)) for each in value):
        yield from (min(value), median(value), max(value))
        yield from value if len(value) <= FEW_VALUES else ()
    elif isinstance(value, list):
        for each in value:
            yield from values_of(each)
    elif isinstance(value, str):
        yield from (float(number.text.replace(",", "")) for number in numbers_of(value))
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield float(value)


def spreads_of(value: Any) -> Iterator[tuple[float, float, float]]:
    if isinstance(value, list) and value and all(isinstance(each, (int, float)) for each in value):
        yield (median(value), min(value), max(value))
    elif isinstance(value, (list, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from spreads_of(each)
        if isinstance(value, dict) and isinstance(value.get("least"), (int, float)):
            numbers = (n for key, n in value.items() if isinstance(n, (int, float)) and key not in ("least", "most"))
            yield from ((number, value["least"], value["most"]) for number in numbers)
    elif isinstance(value, str):
        for three in _SPREAD.findall(value):
            middle, least, most = (float(text.replace(",", "")) for text in three)
            yield (middle, least, most)


def texts_of(value: Any) -> Iterator[str]:
    """Names, texts and whole numbers."""
    if isinstance(value, dict):
        yield from value
    if isinstance(value, (list, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from texts_of(each)
    elif isinstance(value, (str, int)):
        yield str(value)


def record_of(part: Any) -> Record:
    beside = {key: value for key, value in part.items() if _PUBLISHED.search(key)} if isinstance(part, dict) else {}
    own = {key: value for key, value in part.items() if key not in beside} if isinstance(part, dict) else part
    published = tuple(values_of(beside))
    if isinstance(part, dict) and any(isinstance(v, str) and _PUBLISHED.search(v) for v in own.values()):
        published += tuple(values_of(own))  # a row of the original's
    words = frozenset(word for text in texts_of(part) for word in words_of(text))
    return Record(tuple(values_of(own)), published, tuple(spreads_of(part)), words)


@dataclass(frozen=True)
class Source:
    """A file's rows, and its title and notes; a file that has no rows is one row."""

    rows: tuple[Record, ...]
    rest: Record

    @cached_property
    def prose(self) -> tuple[float, ...]:
        """The numbers that a text may quote."""
        told = (*self.rest.numbers, *self.rest.published)
        in_rows = [number for row in self.rows for number in (*row.numbers, *row.published)]
        return (*told, *(in_rows if len(in_rows) <= FEW_NUMBERS else ()))


@cache
def read_source(path: Path) -> Source:
    parts = {key: value for key, value in json.loads(path.read_text()).items() if key != "environment"}
    rows = parts.pop("rows", None) or [parts]
    return Source(tuple(map(record_of, rows)), record_of(parts))


def together(records: Sequence[Record]) -> Record:
    def joined(name: str) -> tuple[Any, ...]:
        return tuple(each for record in records for each in getattr(record, name))

    return Record(joined("numbers"), joined("published"), joined("spreads"), frozenset(joined("words")))


def faults(text: str, *, measured: bool, read: Callable[[str], Source]) -> list[str]:
    """Figures of a page that no file holds; ``read`` opens a file by its name."""
    return [
        fault for section in re.split(r"(?m)^(?=#{1,6} )", outside_code(text))
        for fault in _faults_of_section(section, measured=measured, read=read)
    ]  # fmt: skip


def outside_code(text: str) -> str:
    """A heading inside a block of code is a comment."""
    return re.sub(r"(?ms)^```.*?^```$", "", text)


def _faults_of_section(section: str, *, measured: bool, read: Callable[[str], Source]) -> Iterator[str]:
    title = section.partition("\n")[0]
    allowed = re.sub(r"\([^)]*\)", "", " ".join(_MARK.findall(section))).replace(";", " ").split()
    if "all" in allowed:
        return
    yield from (f"{title}: {each} is let be, but not there" for each in allowed if section.count(each) < 2)
    names = sorted(set(re.findall(r"benchmarks/results/([\w./-]+\.json)", section)))
    sources = [read(name) for name in names]
    rows = [row for source in sources for row in source.rows]
    prose = [number for source in sources for number in source.prose]
    strict, head, before = measured or bool(names), list[str](), ""
    for written in re.sub(r"<!--.*?-->", "", section, flags=re.DOTALL).splitlines()[1:]:
        line = _NO_FIGURE.sub("", written)
        cells = line.strip().strip("|").split("|") if line.startswith("|") else []
        if not cells:
            found = [n for n in numbers_of(line) if n.unit or (strict and "." in n.text)]
            lacking = [n.text for n in found if not n.stands_in(prose)]
        elif not before.startswith("|"):
            head, lacking = cells, []
        elif strict:
            label = written.strip().strip("|").partition("|")[0]
            lacking = _lacking(label, cells, head, rows, allowed)
        else:
            alone = [cell.strip() for cell in cells if re.fullmatch(r"\s*-?[\d,]+\.\d+\s*", cell)]
            lacking = [*alone, *(n.text for cell in cells for n in numbers_of(cell) if n.unit)]
        before = line
        if lacking := [text for text in lacking if text not in allowed]:
            source = " and ".join(names) or "no file that the section names"
            yield f"{title}: {', '.join(lacking)} of {line.strip()!r} in {source}"


def _lacking(
    label: str, cells: Sequence[str], heads: Sequence[str], rows: Sequence[Record], allowed: Sequence[str]
) -> list[str]:
    """Numbers of a table's row that the row of a file with its label and the fewest of them missing lacks."""

    def lacks(row: Record) -> list[str]:
        return [text for cell, head in zip(cells, heads) for text in row.lacks(cell, head=head, allowed=allowed)]

    if not any(numbers_of(cell) for cell in cells):
        return []
    kinds = [[row for row in rows if words_of(part) <= row.words] for part in label.split(" / ")]
    if not all(kinds):
        return [f"no row is {label.strip()!r}"]
    return min((lacks(together(choice)) for choice in product(*kinds)), key=len)
