"""The sum of gradients over the replicas, overlapped with the backward.

torch's DDP and ``replicate`` are as exact, but need a new wrapper at every transition, and they were measured to be
slower: see "The gradient reducer" in ``docs/architecture.md``. This class uses hooks instead. Gradients lie in buckets
of a fixed order, filled from the last parameter to the first as in a backward. One asynchronous ``all_reduce`` sums
each bucket, started in the last micro-batch of the step; of a large table of embeddings it sums the touched rows.

Where replicas share out (``ParallelPlan.shard``), a bucket has one owner among them, where ``reduce`` sums it. Where it
is optimizer state that they share, ``share`` brings the owner's new weights to the others after the update (as ZeRO
does, stage 1: Rajbhandari et al., arXiv 1910.02054, but by whole units, so that state moves by its unit's name). Where
they share gradients too, a bucket goes to its owner behind every micro-batch, and its memory is given back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipetransformer.dp.buckets import Bucket, RowBucket

_BUCKET_BYTES = 8 * 2**20


class GradientReducer:
    """Owns the gradients of ``parameters`` until ``close``; ``finish`` leaves their sums in ``.grad``.

    It takes the sum over the replicas, not the mean: the loss is already divided by the global batch size.

    Args:
        parameters: the parameters of this rank by name, in the order of the forward.
        group: the replicas; None for a single one, where the gradients are autograd's own, but for those of tables.
        owners: the rank that updates each parameter, by name; None where every rank updates all.
        units: the unit of each parameter, by name, where gradients go to their owner behind every micro-batch, so that
            no other rank keeps them, a unit in a bucket of its own at least; None where they stay to the last one.
        tables: names of parameters whose gradients are zero in most rows: the other rows alone are summed, where every
            rank updates all.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        group: dist.ProcessGroup | None,
        owners: Mapping[str, int] | None = None,
        units: Mapping[str, int] | None = None,
        tables: Collection[str] = (),
    ) -> None:
        assert owners is not None or units is None
        self._each = units is not None
        self._under_way: Bucket | None = None  # of those that are given away behind each micro-batch
        self._parameters = dict(parameters)
        self._group = group
        self._rank = dist.get_rank() if group is not None else 0
        self._buckets: list[Bucket] = []
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._accumulations = 0
        self._next = 0
        self._has_memory = False  # from the first step on: what comes before it, as the advance pass, may need the room
        if group is None:
            for name in self._parameters:
                if name in tables:
                    self._add_table(name)
        members: list[tuple[str, nn.Parameter]] = []
        num_bytes, owner, last = 0, None, None
        for name, parameter in reversed(self._parameters.items()) if group is not None else ():
            if owners is None and name in tables:
                if members:
                    self._buckets.append(Bucket(members, owner=owner))
                self._add_table(name)
                members, num_bytes = [], 0
                continue
            kind = (None if owners is None else owners[name], None if units is None else units[name])
            if members and (num_bytes + parameter.nbytes > _BUCKET_BYTES or kind != last):
                self._buckets.append(Bucket(members, owner=owner))
                members, num_bytes = [], 0
            members.append((name, parameter))
            num_bytes += parameter.nbytes
            (owner, _), last = kind, kind
        if members:
            self._buckets.append(Bucket(members, owner=owner))
        for bucket in self._buckets:
            for name, parameter in bucket.members:
                hook = self._hook(bucket, name)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def _add_table(self, name: str) -> None:
        table = self._parameters[name]
        bucket = RowBucket(name, table)
        self._buckets.append(bucket)
        self._handles.append(table.register_hook(bucket.note))  # type: ignore[no-untyped-call]

    def _hook(self, bucket: Bucket, name: str) -> Callable[[Tensor], None]:
        def given_away(parameter: Tensor) -> None:
            assert parameter.grad is not None
            if bucket.missing == len(bucket.members):  # the first of its micro-batch
                if self._under_way is bucket:
                    self._settle()
                bucket.grow()
            bucket.views[name].copy_(parameter.grad)
            parameter.grad = None
            bucket.counts[name] += 1
            bucket.missing -= 1
            if bucket.missing == 0:
                bucket.missing = len(bucket.members)
                self._settle()  # so that no more than two buckets have memory
                bucket.start(self._group)
                self._under_way = bucket

        def accumulated(parameter: Tensor) -> None:
            if parameter.grad is None:  # zero_bubble found none; ``finish`` names the parameter
                return
            if bucket.counts[name] == 0:
                bucket.take(name, parameter)
            bucket.counts[name] += 1
            if bucket.counts[name] == self._accumulations:
                bucket.missing -= 1
                if bucket.missing == 0:
                    self._launch()

        return given_away if self._each else accumulated

    def _settle(self) -> None:
        if self._under_way is not None:
            self._under_way.settle(self._rank)
            self._under_way = None

    def _launch(self) -> None:
        """Starts the sums of all complete buckets, in the fixed order that all ranks share."""
        while self._next < len(self._buckets) and self._buckets[self._next].missing == 0:
            self._buckets[self._next].start(self._group)
            self._next += 1

    @property
    def sent_bytes(self) -> int:
        """Bytes of gradients that this rank has given to be summed since ``begin``; without weights that move."""
        return sum(bucket.sent_bytes for bucket in self._buckets)

    def begin(self, *, num_microbatches: int) -> None:
        """Clears the gradients before a step of ``num_microbatches`` backward passes."""
        for parameter in self._parameters.values():
            parameter.grad = None
        self._accumulations = num_microbatches
        self._next = 0
        for bucket in self._buckets:
            if not self._each and not self._has_memory:
                bucket.grow()
            bucket.begin()
        self._has_memory = True

    def finish(self) -> None:
        """Waits until every gradient is the sum over the replicas, on its owner where it has one; elsewhere it is gone.

        Raises:
            RuntimeError: if parameters received no gradient in some micro-batch; it names them.
        """
        unused = [name for name, parameter in self._parameters.items() if parameter.grad is None and not self._each]
        if self._next < len(self._buckets):
            incomplete = [n for b in self._buckets for n, c in b.counts.items() if c != self._accumulations]
            unused += [name for name in incomplete if name not in unused]
        if unused:
            raise RuntimeError(f"parameters without a gradient in this step: {', '.join(unused)}")
        self._settle()
        for bucket in self._buckets:
            if self._each:
                bucket.give_totals()
                continue
            bucket.wait()
            if bucket.owner not in (None, self._rank):
                for _, parameter in bucket.members:
                    parameter.grad = None

    @torch.no_grad()
    def share(self) -> None:
        """Brings the weights that owners have updated to the other replicas, by the memory of the gradients."""
        owned = [bucket for bucket in self._buckets if bucket.owner is not None]
        for bucket in owned:
            assert bucket.owner is not None
            if not self._has_memory:
                bucket.grow()
            if bucket.owner == self._rank:
                for name, parameter in bucket.members:
                    parameter.grad = None
                    bucket.views[name].copy_(parameter)
            bucket.work = dist.broadcast(bucket.flat, bucket.owner, group=self._group, async_op=True)
        for bucket in owned:
            bucket.wait()
            if bucket.owner != self._rank:
                for name, parameter in bucket.members:
                    parameter.copy_(bucket.views[name])
            if not self._has_memory:
                bucket.shrink()

    def close(self) -> None:
        """Removes the hooks and frees the memory of the gradients."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._buckets.clear()
        for parameter in self._parameters.values():
            parameter.grad = None
