"""The reducer's gradients are the sum over the replicas, and it leaves nothing behind."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool
from torch import Tensor, nn

from pipetransformer.adapter import LiveBytes
from pipetransformer.dp import GradientReducer
from pipetransformer.dp import reducer as reducer_module
from pipetransformer.process.world import World

WIDTH = 8
EXACT = 1e-12


def model() -> nn.Module:
    """The same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)), nn.LayerNorm(WIDTH)).double()


def rows(rank: int, step: int, *, num_microbatches: int) -> tuple[Tensor, ...]:
    """Other data on every rank and step."""
    random = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4 * num_microbatches, WIDTH, dtype=torch.float64, generator=random).chunk(num_microbatches)


def backward(net: nn.Module, rank: int, step: int, *, num_microbatches: int) -> None:
    for part in rows(rank, step, num_microbatches=num_microbatches):
        net(part).square().sum().backward()


def gradients(net: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in net.parameters()]


def summed(world_size: int, step: int, *, num_microbatches: int) -> list[Tensor]:
    """What autograd alone gives on the rows of all ranks."""
    net = model()
    for rank in range(world_size):
        backward(net, rank, step, num_microbatches=num_microbatches)
    return [grad.clone() for grad in gradients(net) if grad is not None]


def largest_error(found: list[Tensor | None], expected: list[Tensor]) -> float:
    errors = []
    for have, want in zip(found, expected, strict=True):
        assert have is not None
        errors.append(float((have - want).abs().max() / want.abs().max()))
    return max(errors)


class _Launches:
    """Counts the reductions that have been started."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self._all_reduce = dist.all_reduce
        patch.setattr(dist, "all_reduce", self)

    def __call__(self, tensor: Tensor, **options: object) -> object:
        self.count += 1
        return self._all_reduce(tensor, **options)


def reduces(world: World, bucket_bytes: int, num_microbatches: int) -> tuple[list[float], list[int], int]:
    """Largest errors of three steps; of the last, reductions begun (before, after) its last micro-batch, and bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reducer_module, "_BUCKET_BYTES", bucket_bytes)
        launches = _Launches(patch)
        net = model()
        reducer = GradientReducer(dict(net.named_parameters()), group=dist.group.WORLD)
        errors = []
        for step in range(3):
            launches.count = 0
            before = 0
            reducer.begin(num_microbatches=num_microbatches)
            for part in rows(world.rank, step, num_microbatches=num_microbatches):
                before = launches.count
                net(part).square().sum().backward()
            after = launches.count
            reducer.finish()
            errors.append(largest_error(gradients(net), summed(world.size, step, num_microbatches=num_microbatches)))
        sent_bytes = reducer.sent_bytes
        reducer.close()
    return errors, [before, after], sent_bytes


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("num_microbatches", [1, 3])
@pytest.mark.parametrize(
    ("bucket_bytes", "num_buckets"),
    [(1, 10), (8 * WIDTH * (WIDTH + 2), 5), (2**20, 1)],  # one parameter each; one layer each; all of them
)
def test_gradients_are_the_sum_and_reduced_in_the_last_backward(
    ranks: RankPool, world_size: int, num_microbatches: int, bucket_bytes: int, num_buckets: int
) -> None:
    for errors, launches, sent_bytes in ranks.run(world_size, reduces, bucket_bytes, num_microbatches):
        assert max(errors) < EXACT
        assert launches == [0, num_buckets]
        assert sent_bytes == sum(parameter.nbytes for parameter in model().parameters())


def misses_a_gradient(world: World) -> str:
    net = nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2, bias=False)})
    reducer = GradientReducer(dict(net.named_parameters()), group=dist.group.WORLD)
    reducer.begin(num_microbatches=1)
    net["used"](torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError) as caught:
        reducer.finish()
    return str(caught.value)


def test_unused_parameters_are_named(ranks: RankPool) -> None:
    assert ranks.run(2, misses_a_gradient) == ["parameters without a gradient in this step: unused.weight"] * 2


def bytes_of_buckets(world: World) -> list[int]:
    """Bytes more than before it of a reducer: before its first step, and in it."""
    net = model()
    with LiveBytes() as live:
        reducer = GradientReducer(dict(net.named_parameters()), group=dist.group.WORLD)
        found = [live.alive]
        reducer.begin(num_microbatches=1)
        found.append(live.alive)
        reducer.close()
    return found


def test_buckets_have_no_memory_before_the_first_step(ranks: RankPool) -> None:
    of_model = sum(parameter.nbytes for parameter in model().parameters())
    assert ranks.run(2, bytes_of_buckets) == [[0, of_model]] * 2, "the advance pass may need it"


WORDS = 40


class _Table(nn.Module):
    """A linear layer behind a table of embeddings."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.last = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.words(ids))  # type: ignore[no-any-return]


def ids_of(rank: int, step: int, *, num_microbatches: int, is_dense: bool) -> list[Tensor]:
    """Other rows on every rank and step, a few of them shared; nearly all on rank 1 where it is ``is_dense``."""
    own = torch.arange(WORDS - 1) if is_dense and rank == 1 else torch.tensor([0, 2 * rank + 1, 2 * rank + 2])
    return [(own + part) % WORDS if step else own for part in range(num_microbatches)]


def of_table(net: _Table, rank: int, step: int, num_microbatches: int, is_dense: bool) -> None:
    for ids in ids_of(rank, step, num_microbatches=num_microbatches, is_dense=is_dense):
        net(ids).square().sum().backward()


def sums_rows(
    world: World, num_microbatches: int, is_dense: bool, gives_rows: bool
) -> tuple[list[float], list[int], bool]:
    """Largest errors of three steps, bytes given to be summed in each, and whether one memory had all gradients."""
    net, errors, sent, places = _Table(), list[float](), list[int](), set[int]()
    net.words.sparse = gives_rows
    reducer = GradientReducer(dict(net.named_parameters()), group=dist.group.WORLD, tables=["words.weight"])
    for step in range(3):
        reducer.begin(num_microbatches=num_microbatches)
        of_table(net, world.rank, step, num_microbatches, is_dense)
        reducer.finish()
        alone = _Table()
        for rank in range(world.size):
            of_table(alone, rank, step, num_microbatches, is_dense)
        errors.append(largest_error(gradients(net), [grad for grad in gradients(alone) if grad is not None]))
        sent.append(reducer.sent_bytes)
        gradient = net.words.weight.grad
        assert gradient is not None and not gradient.is_sparse
        places.add(gradient.data_ptr())
        gradient.mul_(-2.0)  # as an optimizer may
    reducer.close()
    return errors, sent, len(places) == 1


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("is_dense", [False, True])
@pytest.mark.parametrize("gives_rows", [False, True])
def test_of_a_table_the_touched_rows_alone_are_summed(
    ranks: RankPool, world_size: int, num_microbatches: int, is_dense: bool, gives_rows: bool
) -> None:
    for errors, sent, is_one in ranks.run(world_size, sums_rows, num_microbatches, is_dense, gives_rows):
        assert max(errors) < EXACT and is_one
        touched = WORDS if is_dense else 2 * world_size + 1
        others = sum(parameter.nbytes for parameter in _Table().last.parameters())
        assert sent[0] == others + WORDS + 8 * WIDTH * touched, "one byte a row tells which are touched"


def loses_numbers(world: World) -> list[bool]:
    """Whether rows 0 and 5 of the table have a gradient that is no number, after rank 1 alone had one: in row 5."""
    net = _Table()
    reducer = GradientReducer(dict(net.named_parameters()), group=dist.group.WORLD, tables=["words.weight"])
    reducer.begin(num_microbatches=1)
    loss = net(torch.tensor([5 * world.rank])).sum()
    (loss * float("nan") if world.rank else loss).backward()
    reducer.finish()
    assert net.words.weight.grad is not None
    found = net.words.weight.grad[[0, 5]].isnan().any(1).tolist()
    reducer.close()
    return found


def test_what_is_no_number_reaches_all_replicas(ranks: RankPool) -> None:
    assert ranks.run(2, loses_numbers) == [[False, True]] * 2


def closes(world: World) -> tuple[bool, float]:
    """Whether gradients and buckets are gone; the error of a step that rank 0 then takes alone."""
    net = model()
    reducer = GradientReducer(dict(net.named_parameters()), group=dist.group.WORLD)
    reducer.begin(num_microbatches=1)
    backward(net, world.rank, 0, num_microbatches=1)
    reducer.finish()
    buckets = [weakref.ref(grad._base) for grad in gradients(net) if grad is not None and grad._base is not None]
    assert buckets
    reducer.close()
    del reducer
    gc.collect()
    cleared = all(gone is None for gone in (*gradients(net), *(bucket() for bucket in buckets)))
    if world.rank > 0:
        return cleared, 0.0
    backward(net, 0, 1, num_microbatches=1)
    return cleared, largest_error(gradients(net), summed(1, 1, num_microbatches=1))


def test_hooks_and_gradients_are_gone_after_close(ranks: RankPool) -> None:
    for cleared, error in ranks.run(2, closes):
        assert cleared
        assert error == 0.0


def test_without_replicas_gradients_are_autograd_s_own() -> None:
    net = model()
    reducer = GradientReducer(dict(net.named_parameters()), group=None)
    for step in range(2):
        reducer.begin(num_microbatches=2)
        assert all(grad is None for grad in gradients(net))
        backward(net, 0, step, num_microbatches=2)
        reducer.finish()
        assert largest_error(gradients(net), summed(1, step, num_microbatches=2)) == 0.0
    reducer.close()


def test_without_replicas_a_table_s_gradient_has_its_own_memory() -> None:
    net, alone = _Table(), _Table()
    net.words.sparse = True
    reducer = GradientReducer(dict(net.named_parameters()), group=None, tables=["words.weight"])
    for step in range(3):
        reducer.begin(num_microbatches=2)
        of_table(net, 1, step, 2, is_dense=False)
        reducer.finish()
        alone.zero_grad()
        of_table(alone, 1, step, 2, is_dense=False)
        assert largest_error(gradients(net), [grad for grad in gradients(alone) if grad is not None]) < EXACT
    reducer.begin(num_microbatches=1)
    net.last(torch.ones(WIDTH, dtype=torch.float64)).sum().backward()
    with pytest.raises(RuntimeError, match=r"in this step: words\.weight$"):
        reducer.finish()
    reducer.close()
    assert gradients(net) == [None] * 3
