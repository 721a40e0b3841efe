"""The rule that binds figures on pages to files under ``benchmarks/results/``.

By section of a page (from a heading to the next):

- A section with figures names the files of them, as ``benchmarks/results/NAME.json``.
- A row of a table: all its numbers stand in one row of one file. Where rows hold every word and number of its first
  cell ("one / other": of either), it is one of these, or all of them together if they are few (``MOST_TOGETHER``). A
  ratio of two rows is a figure of the file too, written by its benchmark. Titles and notes count for prose alone.
- Prose: a number with a decimal point, or with a unit, stands in a file of its section.
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
from pathlib import Path
from statistics import median
from typing import Any

MOST_TOGETHER, FEW_VALUES = 5, 8
UNITS: dict[str, tuple[float, ...]] = {  # what a value of a file may be multiplied with
    "%": (100,), "per cent": (100,), "points": (100,), "ms": (1e3,), "s": (1e-3,), "seconds": (1e-3,), "/s": (),
    "minutes": (1 / 60,), "KB": (1e-3,), "MB": (1e-6,), "GB": (1e-9, 1e-3), "KiB": (2**-10,), "MiB": (2**-20,),
    "GiB": (2**-30, 2**-10), "M parameters": (1e-6,), "bytes": (), "times": (),
}  # fmt: skip
_UNIT = "|".join(sorted(map(re.escape, UNITS), key=len, reverse=True))
_NUMBER = re.compile(
    r"(?<![\w.])(?<![\w.]-)(-?\d{1,3}(?:,\d{3})+(?:\.\d+)?|-?\d+(?:\.\d+)?(?:e-?\d+)?)(?!\d|\.\d|,\d{3})"
    rf"(?:\s?({_UNIT})(?!\w)|\s?\w+(/s)(?!\w)|(?!\w))"
)
_NO_FIGURE = re.compile(r'`[^`\n]*`|"[^"\n]*"|\]\([^)]*\)|https?://\S+|<!--.*?-->', re.DOTALL)
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
    """A row of a file: its numbers, and all that it says."""

    numbers: tuple[float, ...]
    words: frozenset[str]

    def lacks(self, numbers: Sequence[Number]) -> list[str]:
        return [number.text for number in numbers if not number.stands_in(self.numbers)]


def numbers_of(text: str, *, head: str | None = None) -> list[Number]:
    """Of a text without code; in a cell, those without a unit take the first of the cell, or that of its column."""
    found = [(digits, unit or rate) for digits, unit, rate in _NUMBER.findall(text)]
    if head is None:
        return [Number(digits, unit or None) for digits, unit in found]
    above = (unit for unit in UNITS if re.search(rf"(?<!\w){re.escape(unit)}(?!\w)", head))
    shared = next(filter(None, [*(unit for _, unit in found), *above]), None)
    return [Number(digits, unit or shared) for digits, unit in found]


def words_of(text: str) -> frozenset[str]:
    return frozenset(word for word in re.findall(r"[^\W_]+", text.lower()) if len(word) > 1 or word.isdigit())


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


@dataclass(frozen=True)
class Source:
    """A file's rows, and its title and notes; a file that has no rows is one row."""

    rows: tuple[Record, ...]
    rest: Record


@cache
def read_source(path: Path) -> Source:
    parts = {key: value for key, value in json.loads(path.read_text()).items() if key != "environment"}
    rows = parts.pop("rows", None) or [parts]
    found = [Record(tuple(values_of(part)), words_of(json.dumps(part, ensure_ascii=False))) for part in [*rows, parts]]
    return Source(tuple(found[:-1]), found[-1])


def together(records: Sequence[Record]) -> Record:
    return Record(tuple(n for record in records for n in record.numbers), frozenset())


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
    everything = together([*rows, *(source.rest for source in sources)])
    strict, head, before = measured or bool(names), list[str](), ""
    for line in _NO_FIGURE.sub("", section).splitlines()[1:]:
        cells = line.strip().strip("|").split("|") if line.startswith("|") else []
        if not cells:
            found = [n for n in numbers_of(line) if n.unit or (strict and "." in n.text)]
            lacking = everything.lacks(found)
        elif not before.startswith("|"):
            head, lacking = cells, []
        elif strict:
            found = [n for cell, top in zip(cells, head) for n in numbers_of(cell, head=top) if n.text not in allowed]
            lacking = _lacking(cells[0], found, rows)
        else:
            alone = [cell.strip() for cell in cells if re.fullmatch(r"\s*-?[\d,]+\.\d+\s*", cell)]
            lacking = [*alone, *(n.text for cell in cells for n in numbers_of(cell) if n.unit)]
        before = line
        if lacking := [text for text in lacking if text not in allowed]:
            source = " and ".join(names) or "no file that the section names"
            yield f"{title}: {', '.join(lacking)} of {line.strip()!r} in {source}"


def _lacking(label: str, numbers: Sequence[Number], rows: Sequence[Record]) -> list[str]:
    """Numbers of a table's row that the row of a file with the fewest of them missing lacks."""
    labels = [words for words in map(words_of, label.split(" / ")) if any(map(str.isalpha, words))]
    labelled = [row for row in rows if any(words <= row.words for words in labels)]
    few = together(labelled if len(labelled) <= MOST_TOGETHER else [])
    return min((row.lacks(numbers) for row in [*(labelled or rows), few]), key=len)
