"""What one rank does for others: they wait for it however long it takes, and hear of its mistakes."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist
from ranks import RankPool

from pipetransformer.adapter import is_peer_failure, patient_group
from pipetransformer.errors import UserError
from pipetransformer.process.agreement import Disagreement, agree, agree_by_name
from pipetransformer.process.collectives import by_all, given_to, led_by, patiently
from pipetransformer.process.world import World


def hurry(world: World) -> None:
    group = dist.group.WORLD
    assert group is not None
    group._get_backend(world.device)._set_default_timeout(timedelta(seconds=2))


def led(world: World, seconds: float, how: str) -> str:
    """Ranks 0 and 2 lead two ranks each, in a group whose collectives may take two seconds."""
    hurry(world)
    leader = world.rank - world.rank % 2

    def action() -> str:
        time.sleep(seconds)
        if how == "mistake" and world.rank == 2:
            raise UserError("data.path: nothing there")
        return f"by {world.rank}"

    try:
        return led_by(leader, action)
    except UserError as error:
        return str(error)


@pytest.mark.parametrize("seconds", [0.0, 5.0])
def test_followers_wait_longer_than_a_collective_may_take(seconds: float, ranks: RankPool) -> None:
    assert ranks.run(4, led, seconds, "well") == ["by 0", "by 0", "by 2", "by 2"]


def test_a_leaders_mistake_reaches_every_rank(ranks: RankPool) -> None:
    assert ranks.run(4, led, 0.0, "mistake") == ["data.path: nothing there"] * 4


def failing(world: World) -> str:
    """Rank 1's action fails by no mistake of the user's: the others do not wait for it."""
    group = patient_group(timeout=timedelta(seconds=20))
    try:
        by_all(lambda: 1 // (world.rank - 1), group=group)
    except Exception as error:
        return f"{type(error).__name__} {is_peer_failure(error)}"
    return "none"


def test_a_failure_in_what_all_do_reaches_every_rank(ranks: RankPool) -> None:
    assert ranks.run(3, failing) == ["RuntimeError True", "ZeroDivisionError False", "RuntimeError True"]


def waited_for(world: World) -> int:
    """Rank 1 takes longer than a collective may."""
    hurry(world)
    return patiently(lambda: time.sleep(4.0 * (world.rank == 1)) or world.rank)


def test_all_wait_for_the_slowest_rank(ranks: RankPool) -> None:
    assert ranks.run(3, waited_for) == [0, 1, 2]


def handed(world: World, how: str) -> tuple[list[int], list[int], str]:
    """Three items, made by all ranks together; rank 1's consumer takes three seconds with the second."""
    hurry(world)
    made, seen = list[int](), list[int]()

    def items() -> Iterator[int]:
        for number in range(3):
            dist.barrier()
            made.append(number)
            yield number

    def consumer(given: Iterator[int]) -> None:
        for number in given:
            assert made[-1] == number, "it is asked for before the one before is done with"
            if how == "full" and number == 1:
                raise UserError("model: no space left")
            time.sleep(3.0 * (how == "slow" and number == 1))
            seen.append(number)
            if how == "enough":
                return

    try:
        given_to(1, items(), consumer)
    except UserError as error:
        return made, seen, str(error)
    return made, seen, ""


@pytest.mark.parametrize(
    ("how", "seen", "error"),
    [("slow", [0, 1, 2], ""), ("enough", [0], ""), ("full", [0], "model: no space left")],
)
def test_a_consumer_takes_as_long_as_it_will(how: str, seen: list[int], error: str, ranks: RankPool) -> None:
    everyone = [0, 1, 2]
    assert ranks.run(3, handed, how) == [(everyone, seen if rank == 1 else [], error) for rank in range(3)]


class Item:
    pass


def held_at_once(world: World) -> int:
    """The most items that are alive when one more is made."""
    refs, most = list[weakref.ref[Item]](), [0]

    def items() -> Iterator[Item]:
        for _ in range(4):
            most[0] = max(most[0], sum(ref() is not None for ref in refs))
            made = Item()
            refs.append(weakref.ref(made))
            yield made
            del made

    def consumer(given: Iterator[Item]) -> None:
        for item in given:
            assert item is not None
            del item

    given_to(0, items(), consumer)
    return most[0]


def test_an_item_is_gone_before_the_next_is_made(ranks: RankPool) -> None:
    assert ranks.run(2, held_at_once) == [0, 0]


def agreed(world: World, value: tuple[str, ...]) -> str:
    try:
        agree("plan", value[world.rank])
    except Disagreement as error:
        return str(error)
    return ""


def test_ranks_that_hold_another_plan_are_named(ranks: RankPool) -> None:
    assert ranks.run(3, agreed, ("a", "a", "a")) == [""] * 3
    told = "rank 1 has another plan than the other ranks: 'b' on rank 1, 'a' elsewhere"
    assert ranks.run(3, agreed, ("a", "b", "a")) == [told] * 3
    assert ranks.run(4, agreed, ("a", "b", "b", "c"))[0].startswith("ranks 0, 3 have another plan")


def replicas(world: World, values: tuple[dict[str, int], ...]) -> str:
    try:
        agree_by_name("weights", values[world.rank], group=dist.group.WORLD, step=7)
    except Disagreement as error:
        return str(error)
    return ""


def test_a_replica_with_other_weights_is_named(ranks: RankPool) -> None:
    assert ranks.run(3, replicas, ({"a": 1, "b": -2},) * 3) == [""] * 3
    told = "step 7: rank 2 has other weights of b than its replicas"
    assert ranks.run(3, replicas, ({"a": 1, "b": -2}, {"a": 1, "b": -2}, {"a": 1, "b": 3})) == [told] * 3
