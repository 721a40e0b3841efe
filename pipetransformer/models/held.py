"""The weights of a chain's units that a rank holds, and those that train; those of the others are shapes on the meta
device."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from pipetransformer.models.values import Values

_LARGE_TABLE = 8 * 2**20  # bytes: to find its touched rows is worth the pass over its gradient
_NUMBER = re.compile(r"\.\d+\.")  # of a block


class Held:
    """Parameters by unit, under the model's own names.

    Args:
        values: the weights before training; None where ``model`` has begun with them.
        owner: gives the unit of a parameter, by its name.
        fixed: names of parameters that never train.
        dtype: type that steps compute in.
        rest: type of weights that rest: of frozen units but the last one, before a step has trained them.

    Attributes:
        model: the model that has them.
        device: place of those that are held.
        dtype: type of weights that train.
        untouched: number of leading units that no step has trained.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        device: torch.device,
        values: Values | None,
        owner: Callable[[str], int],
        fixed: Collection[str] = (),
        dtype: torch.dtype,
        rest: torch.dtype | None = None,
    ) -> None:
        self.model, self.device, self.dtype = model, device, dtype
        self._values, self._fixed = values, frozenset(fixed)
        self._owners = {name: owner(name) for name, _ in model.named_parameters()}
        self._places = {name: place for place, name in enumerate(self._owners)}
        paths = {name: name.rpartition(".") for name in self._owners}
        self._slots = {name: (model.get_submodule(path), attribute) for name, (path, _, attribute) in paths.items()}
        self._names: dict[int, list[str]] = {}  # of each unit
        for name, unit in self._owners.items():
            self._names.setdefault(unit, []).append(name)
        self._rest = dtype if rest is None else rest
        self._num_resting = 0  # leading units whose weights rest now
        self._stand_ins: dict[str, Tensor] | None = None
        self.forget_training()

    def unit_of(self, parameter: str) -> int:
        return self._owners[parameter]

    def named_parameters(self, units: Iterable[int]) -> dict[str, nn.Parameter]:
        """The parameters of ``units`` by the model's own names, in the model's order."""
        names = [name for unit in set(units) for name in self._names.get(unit, ())]
        return {name: self._parameter(name) for name in sorted(names, key=self._places.__getitem__)}

    def _parameter(self, name: str) -> nn.Parameter:
        module, attribute = self._slots[name]
        return getattr(module, attribute)  # type: ignore[no-any-return]

    def trained_parameters(self, units: Iterable[int]) -> dict[str, nn.Parameter]:
        """Those of ``named_parameters`` that train while their unit does."""
        return {name: p for name, p in self.named_parameters(units).items() if name not in self._fixed}

    @property
    def large_tables(self) -> frozenset[str]:
        """Names of the large tables of embeddings: a batch gives most of their rows no gradient.

        None on GPUs, where to know the others would stop the device for longer than a sum of all rows takes.
        """
        if self.device.type != "cpu":
            return frozenset()
        tables = (name for name, (module, _) in self._slots.items() if isinstance(module, nn.Embedding))
        return frozenset(name for name in tables if self._parameter(name).numel() * self.dtype.itemsize > _LARGE_TABLE)

    def give_rows(self, tables: Collection[str]) -> None:
        """Has backwards give the touched rows alone of ``tables``, some of the large ones, as sparse tensors, and whole
        gradients of the others.

        Gradients to add them to must be there.
        """
        for name in self.large_tables:
            module, _ = self._slots[name]
            assert isinstance(module, nn.Embedding)
            module.sparse = name in tables and not module.scale_grad_by_freq  # which torch has for dense ones alone

    def resting_type(self, unit: int) -> torch.dtype:
        """The type of the weights of ``unit`` while it is frozen and untouched."""
        return self._rest if unit < max(self._names) else self.dtype

    def holds(self, unit: int) -> bool:
        """Whether this rank has memory for all parameters of ``unit``."""
        return not any(parameter.is_meta for parameter in self.named_parameters([unit]).values())

    def fill(self, units: Iterable[int]) -> None:
        """Gives the released parameters of ``units`` memory, and the values that they had before training."""
        held = list(units)
        released = [name for name, parameter in self.named_parameters(held).items() if parameter.is_meta]
        self.materialize(held)
        for name in released:
            assert self._values is not None
            value = self._values.of(name)
            is_read = self._owners[name] < self.untouched  # and rounded alike, whether or not it rests
            self._parameter(name).data.copy_(value.to(self._rest) if is_read else value)

    def keep(self, units: Iterable[int]) -> None:
        """Has ``fill`` give the present values of ``units`` from now on."""
        assert self._values is not None
        for name, parameter in self.named_parameters(units).items():
            self._values.put(name, parameter.detach())

    @contextmanager
    def lent(self, units: Iterable[int], *, awake: bool = False) -> Iterator[None]:
        """Fills, as a context, those of ``units`` that this rank does not hold.

        Args:
            awake: whether as those that train: in the type that steps compute in, and needing gradients.
        """
        missing = [unit for unit in units if not self.holds(unit)]
        if self._stand_ins is None:
            self.fill(missing)
        else:
            self._stand_in(missing)
        if awake:
            for name, parameter in self.named_parameters(missing).items():
                parameter.data = parameter.data.to(self.dtype)
                parameter.requires_grad_(name not in self._fixed)
        try:
            yield
        finally:
            self.release(missing)

    @contextmanager
    def with_stand_ins(self) -> Iterator[None]:
        """Meanwhile ``lent`` gives random weights, the same ones to all blocks: what does not depend on the values need
        not read a file."""
        self._stand_ins = {}
        try:
            yield
        finally:
            self._stand_ins = None

    def _stand_in(self, units: Iterable[int]) -> None:
        assert self._stand_ins is not None
        for name, parameter in self.named_parameters(units).items():
            key = f"{_NUMBER.sub('.', name, count=1)} {tuple(parameter.shape)}"
            if key not in self._stand_ins:
                random = torch.Generator().manual_seed(len(self._stand_ins))
                like = torch.randn(parameter.shape, generator=random, dtype=torch.float32)
                like = like.mul_(parameter.shape[-1] ** -0.5) if parameter.ndim > 1 else like.mul_(0.1).add_(0.5)
                self._stand_ins[key] = like.to(self.device, self.dtype)
            self._replace(name, nn.Parameter(self._stand_ins[key], requires_grad=False))

    # ---- weights that rest -----------------------------------------------------------------------------------------

    def forget_training(self, *, untouched: int | None = None, frozen: int | None = None) -> None:
        """Takes the first ``untouched`` units for untrained, and the first ``frozen`` for frozen; None for all."""
        most = max(self._owners.values())
        self.untouched = most if untouched is None else min(untouched, most)
        self.settle_types(most if frozen is None else frozen)

    def settle_types(self, first_active: int) -> None:
        """Gives the weights of all units before ``first_active`` that are untouched the type in which they rest, and
        all others the one that steps compute in. Values stay as they are: they were read in the narrower type.
        """
        self._num_resting = min(self.untouched, first_active)
        for name, unit in self._owners.items():
            parameter, dtype = self._parameter(name), self._type_of(unit)
            if parameter.dtype == dtype:
                continue
            if parameter.is_meta:
                self._replace(name, nn.Parameter(torch.empty_like(parameter, dtype=dtype), requires_grad=False))
            else:
                parameter.data = parameter.data.to(dtype)

    def _type_of(self, unit: int) -> torch.dtype:
        return self._rest if unit < self._num_resting else self.dtype

    def _awake(self, unit: int) -> AbstractContextManager[None]:
        """For the time of a forward, the weights of a unit that rests are in the type that it computes in."""
        rests = unit < self._num_resting and self._parameter(self._names[unit][0]).dtype != self.dtype
        return self._widened(unit) if rests else nullcontext()

    @contextmanager
    def _widened(self, unit: int) -> Iterator[None]:
        resting = self.named_parameters([unit])
        for name, parameter in resting.items():
            self._replace(name, nn.Parameter(parameter.detach().to(self.dtype), requires_grad=False))
        try:
            yield
        finally:
            for name, parameter in resting.items():
                self._replace(name, parameter)

    # ---- places ----------------------------------------------------------------------------------------------------

    def _set_trained(self, first_active: int) -> None:
        """Has the parameters of all units from ``first_active`` on train, where they are held, and no others.

        Those that do not need no gradient and hold none: no weight decay, no momentum drift.
        """
        for name, unit in self._owners.items():
            parameter, is_trained = self._parameter(name), unit >= first_active and name not in self._fixed
            parameter.requires_grad_(is_trained and not parameter.is_meta)
            if not is_trained:
                parameter.grad = None

    def release(self, units: Iterable[int]) -> None:
        """Gives the parameters' memory of ``units`` back; their shapes and names stay."""
        self._move(units, device=torch.device("meta"))

    def materialize(self, units: Iterable[int]) -> None:
        """Uninitialised memory for the released parameters of ``units``, to be filled by a transfer."""
        self._move(units, device=self.device)

    def in_one_piece(self, unit: int) -> Tensor:
        """Lays the parameters of ``unit`` one after another in one tensor, which it gives: their values where they are
        held, uninitialised memory elsewhere."""
        parameters, is_held = self.named_parameters([unit]), self.holds(unit)
        dtype = next(iter(parameters.values())).dtype
        piece, end = torch.empty(sum(p.numel() for p in parameters.values()), dtype=dtype, device=self.device), 0
        for name, old in parameters.items():
            start, end = end, end + old.numel()
            view = piece[start:end].view(old.shape)
            if is_held:
                old.data = view.copy_(old.data)
            else:  # Note: ``data``, so that what is written into the piece is no change of the parameter to autograd.
                self._replace(name, nn.Parameter(view.data, requires_grad=False))
        return piece

    def _move(self, units: Iterable[int], *, device: torch.device) -> None:
        """New parameters, without their values, in place of those that are on the other side."""
        for name, old in self.named_parameters(units).items():
            if old.is_meta != (device.type == "meta"):
                new = torch.empty_like(old, device=device, dtype=self._type_of(self._owners[name]))
                self._replace(name, nn.Parameter(new, requires_grad=False))

    def _replace(self, name: str, new: nn.Parameter) -> None:
        module, attribute = self._slots[name]
        setattr(module, attribute, new)
