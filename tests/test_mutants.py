"""The mutants of ``make mutants``: they fit the code of today, and change nothing that no test could see."""

from __future__ import annotations

import ast
from pathlib import Path
from textwrap import dedent

import mutants
import pytest
from drawn_mutants import OPERATORS, changes
from planted_mutants import PLANTED

NUM_PLANTED = len(PLANTED)
SOURCE = dedent(
    '''
    """1 < 2"""

    from typing import TYPE_CHECKING

    if TYPE_CHECKING:
        from a import b

    __all__ = ["f"]
    SIZE = 3 + 1

    class A:
        width: int = 4 - 1

        def f(self, first: list[int], second: int = 1 + 1) -> int:
            """Compares 1 < 2."""
            assert first > 2
            if first != []:
                raise ValueError(f(1, 2), f"{first[1]}")
            print(first, second)
            self.tracker.line(first, second)
            dist.barrier()
            count = max(first, 1)
            if self.device == "cuda":
                self.copy(first, second)
            return count

        def g(self, a, b):
            self.note(a, b)
            if (a) <= b:
                return range(1, a)[b - 1 :]
            return self.h(x=a, y=b)
    '''
)


def test_the_four_operators_change_what_they_should() -> None:
    found = {(change.operator, change.before, change.after) for change in changes(SOURCE)}
    assert found == {
        ("comparison", "!=", "=="),
        ("comparison", "<=", ">"),
        ("off by one", "1", "2"),
        ("dropped call", "self.note(a, b)", "pass"),
        ("swapped argument", "a, b", "b, a"),
        ("swapped argument", "1, a", "a, 1"),
        ("swapped argument", "a, y=b", "b, y=a"),
    }


@pytest.mark.parametrize("seed", range(3))
def test_all_mutants_are_modules_that_differ(seed: int) -> None:
    made = [*mutants.planted(), *mutants.drawn(seed)]
    assert (
        len(made) == len({one.name for one in made}) == len({(one.path, one.text) for one in made}) == NUM_PLANTED + 40
    )
    for one in made:
        ast.parse(one.text)
        assert one.text != mutants.source_of(one.path)
    for operator in OPERATORS:
        assert sum(f" {operator}: " in one.name for one in made) == 10
    assert mutants.drawn(seed) == made[NUM_PLANTED:], "the same for the same seed"
    assert mutants.drawn(seed + 1) != made[NUM_PLANTED:]


def test_every_mutant_has_tests_that_exist() -> None:
    places = [
        mutants._TIMED,
        *(test for tests in mutants.TESTS.values() for test in tests),
        *(t for one in PLANTED for t in one.tests),
    ]
    for place in places:
        file, _, name = place.partition("::")
        text = (mutants.ROOT / file).read_text(encoding="utf-8")
        assert f"\ndef {name}(" in text or not name, place


def test_results_are_kept_for_the_text_that_they_are_of(tmp_path: Path) -> None:
    path = tmp_path / "results"
    assert mutants._known(path) == {}
    lines = (
        '{"name": "a", "digest": "1", "by": "tests/x.py", "seconds": 2.0}',
        '{"name": "b", "digest": "2", "by": null}',
    )
    path.write_text("\n".join(lines) + "\n")
    assert mutants._known(path) == {("a", "1"): mutants.Outcome("tests/x.py", 2.0)}, "survivors are run again"
