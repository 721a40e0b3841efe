"""What one sum over the replicas takes: gradients of some parameters, or the rows of a table that any has touched."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipetransformer.adapter import give_memory, rows_of


class Bucket:
    """Gradients that one call sums.

    Attributes:
        members: the parameters, with their names.
        flat: the gradients of all members, one after the other [elements].
        views: the place of each parameter's gradient, by name.
        counts: backward passes of this step that gave a gradient, by parameter name.
        missing: number of parameters that still wait for their last gradient of this step.
        work: the sum, or the move of weights, under way, or None.
        owner: the rank that updates them; None where every rank does.
        sent_bytes: bytes that this rank has given to be summed in this step.
        total: sum of the step's micro-batches so far, on the owner, where gradients go there behind each; else None.
    """

    total: Tensor | None

    def __init__(self, members: list[tuple[str, nn.Parameter]], *, owner: int | None = None) -> None:
        self.members, self.owner = members, owner
        first = members[0][1]
        self.flat = torch.empty(sum(p.numel() for _, p in members), dtype=first.dtype, device=first.device)
        self.views: dict[str, Tensor] = {}
        self.work: dist.Work | None = None
        offset = 0
        for name, parameter in members:
            self.views[name] = self.flat[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()
        self.shrink()
        self.begin()

    def grow(self) -> None:
        """Makes room for gradients."""
        give_memory(self.flat, is_wanted=True)

    def shrink(self) -> None:
        """Gives that room back."""
        give_memory(self.flat, is_wanted=False)

    def take(self, name: str, parameter: Tensor) -> None:
        """Gives the first gradient of a step its place."""
        view = self.views[name]
        assert parameter.grad is not None
        view.copy_(parameter.grad)
        parameter.grad = view

    def start(self, group: dist.ProcessGroup | None) -> None:
        """Begins the sum; ``wait`` ends it."""
        if self.owner is None:
            self.work = dist.all_reduce(self.flat, group=group, async_op=True)
        else:
            self.work = dist.reduce(self.flat, self.owner, group=group, async_op=True)
        self.sent_bytes += self.flat.nbytes

    def settle(self, rank: int) -> None:
        """Ends the sum of a micro-batch: its owner adds it to those before, and nothing else stays."""
        self.wait()
        if self.owner == rank:
            self.total = self.flat.clone() if self.total is None else self.total.add_(self.flat)
        self.shrink()

    def give_totals(self) -> None:
        """Makes the sums of all micro-batches the parameters' gradients, on their owner."""
        offset = 0
        for _, parameter in self.members if self.total is not None else ():
            assert self.total is not None
            parameter.grad = self.total[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()

    def wait(self) -> None:
        assert self.work is not None
        self.work.wait()
        self.work = None

    def begin(self) -> None:
        """Prepares for a step: no backward pass counted.

        Note: nothing is zeroed. The first gradient of a step is copied to its place, with fewer passes over the memory
        than adding it to zeros there.
        """
        self.missing, self.total, self.sent_bytes = len(self.members), None, 0
        self.counts = dict.fromkeys((name for name, _ in self.members), 0)


class RowBucket(Bucket):
    """The gradient of one table of embeddings, of which the rows are summed that any replica has touched.

    A batch has few of the words. The other rows are zeros on every replica, and so is their sum. (As Horovod and
    Parallax do for sparse tensors: Kim et al., "Parallax", arXiv 1808.02621.) Its memory stays, and backwards add to
    it: the touched rows alone where the table gives those (``Held.give_rows``), else a whole table, which is looked
    through for them. Nothing else may write to the other rows.
    """

    def __init__(self, name: str, table: nn.Parameter) -> None:
        self._name, self._table = name, table
        self._touched = torch.zeros(len(table), dtype=torch.uint8, device=table.device)  # 1 for a row with any bit
        self._group: dist.ProcessGroup | None = None
        super().__init__([(name, table)])

    @property
    def _gradient(self) -> Tensor:
        return self.views[self._name]

    def grow(self) -> None:
        super().grow()
        self._gradient.zero_()

    def begin(self) -> None:
        if self.flat.untyped_storage():
            self._find_touched()  # of a step that was left half-way
            self._gradient[self._touched.nonzero().squeeze(1)] = 0.0
            self._touched.zero_()
            self._table.grad = self._gradient
        super().begin()
        self._num_noted = 0

    def note(self, gradient: Tensor) -> None:
        """Takes note of the rows that a backward gives, before they are added."""
        if gradient.is_sparse:
            self._touched[rows_of(gradient)] = 1
            self._num_noted += 1

    def _find_touched(self) -> None:
        """Looks through the gradient, where not all backwards have told their rows."""
        if self._num_noted < self.counts[self._name]:
            self._touched = self._gradient.view(torch.uint8).any(1).byte()  # any bit: what is not a number counts
            self._num_noted = self.counts[self._name]

    def take(self, name: str, parameter: Tensor) -> None:
        pass  # it was added in its place

    def start(self, group: dist.ProcessGroup | None) -> None:
        self._find_touched()
        self._group = group
        if group is not None:
            self.work = dist.all_reduce(self._touched, op=dist.ReduceOp.MAX, group=group, async_op=True)
            self.sent_bytes += self._touched.nbytes

    def wait(self) -> None:
        if self._group is None:
            return
        super().wait()
        rows = self._touched.nonzero().squeeze(1)
        is_dense = 2 * len(rows) > len(self._gradient)
        values = self._gradient if is_dense else self._gradient[rows]
        dist.all_reduce(values, group=self._group)
        if not is_dense:
            self._gradient.index_copy_(0, rows, values)
        self.sent_bytes += values.nbytes
