"""The weights of a chain's units that a rank holds, and those that train; those of the others are shapes on the meta
device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from pipetransformer.models.values import Values


class Held:
    """Parameters by unit, under the model's own names.

    Args:
        values: the weights before training; None where ``model`` has begun with them.
        owner: gives the unit of a parameter, by its name.
        fixed: names of parameters that never train.

    Attributes:
        model: the model that has them.
        device: place of those that are held.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        device: torch.device,
        values: Values | None,
        owner: Callable[[str], int],
        fixed: Collection[str] = (),
    ) -> None:
        self.model, self.device = model, device
        self._values, self._fixed = values, frozenset(fixed)
        self._owners = {name: owner(name) for name, _ in model.named_parameters()}
        self._places = {name: place for place, name in enumerate(self._owners)}
        self._names: dict[int, list[str]] = {}  # of each unit
        for name, unit in self._owners.items():
            self._names.setdefault(unit, []).append(name)

    def unit_of(self, parameter: str) -> int:
        return self._owners[parameter]

    def named_parameters(self, units: Iterable[int]) -> dict[str, nn.Parameter]:
        """The parameters of ``units`` by the model's own names, in the model's order."""
        names = [name for unit in set(units) for name in self._names.get(unit, ())]
        return {name: self.model.get_parameter(name) for name in sorted(names, key=self._places.__getitem__)}

    def trained_parameters(self, units: Iterable[int]) -> dict[str, nn.Parameter]:
        """Those of ``named_parameters`` that train while their unit does."""
        return {name: p for name, p in self.named_parameters(units).items() if name not in self._fixed}

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
            self.model.get_parameter(name).data.copy_(self._values.of(name))

    def keep(self, units: Iterable[int]) -> None:
        """Has ``fill`` give the present values of ``units`` from now on."""
        assert self._values is not None
        for name, parameter in self.named_parameters(units).items():
            self._values.put(name, parameter.detach())

    @contextmanager
    def lent(self, units: Iterable[int]) -> Iterator[None]:
        """Fills, as a context, those of ``units`` that this rank does not hold. They can be trained."""
        missing = [unit for unit in units if not self.holds(unit)]
        self.fill(missing)
        for parameter in self.trained_parameters(missing).values():
            parameter.requires_grad_()
        try:
            yield
        finally:
            self.release(missing)

    def _set_trained(self, first_active: int) -> None:
        """Has the parameters of all units from ``first_active`` on train, where they are held, and no others.

        Those that do not need no gradient and hold none: no weight decay, no momentum drift.
        """
        for name, unit in self._owners.items():
            parameter, is_trained = self.model.get_parameter(name), unit >= first_active and name not in self._fixed
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
                self._replace(name, nn.Parameter(torch.empty_like(old, device=device), requires_grad=False))

    def _replace(self, name: str, new: nn.Parameter) -> None:
        path, _, attribute = name.rpartition(".")
        setattr(self.model.get_submodule(path), attribute, new)
