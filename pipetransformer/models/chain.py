"""A model seen as a chain ``stem -> blocks[0..L) -> head`` of units that keep the model's own parameter names.

A block is one unit, or two: its attention half and its MLP half (``plan/units.py``). A rank holds only some units: the
parameters of the others are released to the meta device and come back by ``materialize`` before a transfer fills them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipetransformer.adapter import WideAttention
from pipetransformer.errors import UserError
from pipetransformer.models.adapters import every_adapter_runs
from pipetransformer.models.families import MASK, Family, family_of
from pipetransformer.models.halves import Halves
from pipetransformer.models.held import Held
from pipetransformer.models.proof import differ, halves_differ, indivisible, row_differs, unlike
from pipetransformer.models.traced import logits_of
from pipetransformer.models.values import Values, during_forward, empty
from pipetransformer.plan.units import Numbering


class Chain(Held):
    """A wrapped model.

    Args:
        model: a model of one of the families; trained in place.
        name: the user's name of it, for error messages.
        precision: ``float32``, ``bfloat16`` or ``float16`` (autocast over float32 weights) or ``float64``; ``auto``
            begins as float32.
        device: place of its tensors.
        units_per_block: 1, or 2 to cut blocks in halves.
        head_row_only: whether the last block is computed for the one row that the head reads, where there is one.
        values: the weights, for a rank that begins without any; None where ``model`` has them.
        fixed: names of parameters that never train.
        rest: type of weights of stem and blocks that are frozen and untrained; None for that of all others.

    Attributes:
        autocasts: whether units compute in ``half``, bfloat16 or float16. It may change before ``learn_shapes``.
        is_compiled: whether blocks run as torch.compile makes them.
        attention: in which type they attend while they train (``adapter/attention.py``).
        stem_modules: the modules of the stem.
        needs_mask: whether texts without padding must bring a mask; they need none in the families of the table.

    Raises:
        UserError: the model is no known chain, or its blocks have no known halves.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        name: str,
        precision: str = "float32",
        device: torch.device,
        units_per_block: int = 1,
        head_row_only: bool = True,
        values: Values | None = None,
        fixed: Collection[str] = (),
        rest: torch.dtype | None = None,
    ) -> None:
        self.name = name
        self.family: Family = family_of(model, name=name)
        dtype = torch.float64 if precision == "float64" else torch.float32
        if values is None:
            model.to(device=device, dtype=dtype)
        else:
            empty(model, device=device, dtype=dtype)
        self.blocks: Sequence[nn.Module] = list(model.get_submodule(self.family.blocks).children())
        self.numbering = Numbering(len(self.blocks), units_per_block)
        self._halves = self.family.halves if units_per_block > 1 else None
        if units_per_block > 1 and self._halves is None:
            raise indivisible(self.name, f"its family, {self.family.name}, has no halves")
        super().__init__(model, device=device, values=values, owner=self._owner, fixed=fixed, dtype=dtype, rest=rest)
        if any(buffer.endswith("running_mean") for buffer, _ in model.named_buffers()):
            raise UserError(
                f"model.name: {name} has batch normalisation, whose statistics would depend on how a batch is cut; "
                "use a model with layer normalisation"
            )
        self.half = torch.float16 if precision == "float16" else torch.bfloat16
        self.autocasts = precision in ("bfloat16", "float16")
        self.attention, self.is_compiled = WideAttention(0), False
        self.needs_mask = True
        self._bodies = self._whole_bodies()  # the forward of each unit between stem and head
        self._head_row_only = head_row_only and self.family.row is not None
        self._narrowing = 0  # the unit that leaves one row of each sample; 0 for none, and before it is proven
        self._leaving: list[tuple[tuple[int, ...], bool, torch.dtype]] = []
        self.stem_modules = [
            module
            for path, module in model.named_modules()
            if path and any(f"{path}.".startswith(prefix) for prefix in self.family.stem_prefixes)
        ]

    def _whole_bodies(self) -> list[Callable[..., Tensor]]:
        """The library's own blocks, or their halves."""
        if self._halves is None:
            return list(self.blocks)
        halves = (self._halves.attention, self._halves.mlp)
        return [partial(half, block) for block in self.blocks for half in halves]

    def _owner(self, parameter: str) -> int:
        prefix = f"{self.family.blocks}."
        if not parameter.startswith(prefix):
            return 0 if parameter.startswith(self.family.stem_prefixes) else self.num_units - 1
        block, _, rest = parameter[len(prefix) :].partition(".")
        half = 0 if self._halves is None else self._halves.owner(rest)
        if half is None:
            raise indivisible(self.name, f"neither half owns {parameter}")
        return self.numbering.first_of(int(block) + 1) + half

    @property
    def num_blocks(self) -> int:
        return self.numbering.num_blocks

    @property
    def num_units(self) -> int:
        return self.numbering.num_units

    @property
    def input_keys(self) -> tuple[str, ...]:
        """Batch entries beside the main input for a rank without a prefix in front of it."""
        return (*self.family.stem_inputs, *self.family.side_inputs)

    def autocast(self) -> torch.autocast | nullcontext[None]:
        if self.autocasts:
            return torch.autocast(self.device.type, dtype=self.half)
        return nullcontext()

    def run(self, units: range, hidden: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        """Runs consecutive units.

        Args:
            hidden: the main input [batch, ...] if unit 0 is the first, else [batch, tokens, width].
            inputs: the other batch entries that stem and blocks read.
        """
        with self.autocast(), self.attention:
            first, stop = units.start, units.stop
            if first == 0:
                main = hidden.to(self.dtype) if hidden.is_floating_point() else hidden
                with self._awake(0):
                    hidden = self.family.stem(self.model, {**inputs, self.family.main_input: main})
                first = 1
            of_blocks = range(first, min(stop, self.num_units - 1))
            if of_blocks:
                one_row = 0 < self._narrowing < first
                arguments = {} if one_row else self.family.block_arguments(self.model, hidden, inputs)
                for unit in of_blocks:
                    if unit == self._narrowing:
                        assert self.family.row is not None
                        arguments["at"] = self.family.row(hidden, inputs)
                    with self._awake(unit):
                        hidden = self._bodies[unit - 1](hidden, **self._of_block(unit, arguments))
            if stop == self.num_units:
                hidden = self.family.head(self.model, hidden, inputs)
        return hidden

    @contextmanager
    def watched(self, see: Callable[[int, Tensor], None]) -> Iterator[None]:
        """Calls ``see`` with a block's number and what leaves it, whenever one has run meanwhile."""
        bodies, last = self._bodies, {self.numbering.behind(n + 1) - 1: n for n in range(self.num_blocks)}

        def seen(block: int, body: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def run(hidden: Tensor, **arguments: Any) -> Tensor:
                leaving = body(hidden, **arguments)
                see(block, leaving)
                return leaving

            return run

        self._bodies = [seen(last[unit], body) if unit in last else body for unit, body in enumerate(bodies, start=1)]
        try:
            yield
        finally:
            self._bodies = bodies

    def _of_block(self, unit: int, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Arguments of the block of ``unit``, from those of all blocks."""
        if self.family.of_block is None or not arguments:
            return arguments
        return self.family.of_block(self.blocks[self.numbering.part_of(unit) - 1], arguments)

    def freeze(self, num_frozen: int, *, stem: bool = False) -> None:
        """Freezes the stem and the first ``num_frozen`` blocks and makes the rest trainable again.

        Where ``num_frozen`` is 0, nothing is frozen, or the stem alone. Frozen modules are in eval mode and stay there.
        """
        assert 0 <= num_frozen <= self.num_blocks
        first_active = max(self.numbering.behind(num_frozen), int(stem))
        self._set_trained(first_active)
        for module in self.stem_modules:
            self._set_sticky_eval(module, frozen=first_active > 0)
        for index, block in enumerate(self.blocks):
            self._set_sticky_eval(block, frozen=index < num_frozen)

    def train(self, mode: bool = True) -> None:
        """Sets train or eval mode of the active units."""
        self.model.train(mode)

    def _set_sticky_eval(self, module: nn.Module, *, frozen: bool) -> None:
        """Keeps a frozen module in eval mode under any call of ``train`` on it or on its owner."""
        for part in module.modules():
            part.__dict__.pop("train", None)
            if frozen:
                part.training = False
                part.__dict__["train"] = lambda mode=True, part=part: part

    def learn_shapes(self, inputs: Mapping[str, Tensor], *, head_row_only: bool = True) -> None:
        """Runs ``inputs`` through the chain, remembers every unit's output shape, and proves the chain right.

        The proof is in the type of the weights: one row of a product in bfloat16 is rounded in another way than all.

        Args:
            head_row_only: whether the last block may be computed for the head's row alone.

        Raises:
            UserError: the logits differ from those of the model's own forward, as for a variant that overrides the
                forward of its family, or halves from their block.
        """
        self.model.eval()
        main = inputs[self.family.main_input]
        side = {key: inputs[key] for key in self.input_keys}
        autocasts, self.autocasts, found = self.autocasts, False, ""
        with torch.no_grad(), self.with_stand_ins(), self.lent((0, self.num_units - 1), awake=True):
            with during_forward(self.blocks, self._lent_block), every_adapter_runs(self.model, name=self.name):
                expected = self._own_outputs(main, side)
            for row_only in (True, False) if self._head_row_only and head_row_only else (False,):
                found = self._other_than(expected, main, side, row_only=row_only)
                if not found:
                    break
            self.needs_mask = not found and self._answers_otherwise_unmasked(main, side)
            self.autocasts = autocasts
            if autocasts and not found:
                self._run_by_unit(main, side)
        if found:
            raise unlike(self.name, self.family.name, found)

    def compile(self) -> None:
        """Has the blocks run as torch.compile makes them, from their next forward on."""
        self._bodies, self.is_compiled = [torch.compile(body) for body in self._bodies], True

    def assume_shapes(self, inputs: Mapping[str, Tensor]) -> None:
        """Remembers every unit's output shape, and takes the chain to be right, where there is nothing but shapes."""
        side = {key: inputs[key] for key in self.input_keys if key in inputs}
        self.model.eval()
        with torch.no_grad():
            self._run_by_unit(inputs[self.family.main_input], side)

    def _other_than(self, expected: Tensor, main: Tensor, side: Mapping[str, Tensor], *, row_only: bool) -> str:
        """The difference of the chain to ``expected``, in words; empty where there is none."""
        self._bodies, self._narrowing = self._whole_bodies(), 0
        try:
            outputs = self._run_by_unit(main, side, proves=True, row_only=row_only)
        except UserError:
            raise
        except Exception as error:  # blocks that take other arguments, say; the model's own forward did well
            return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return "other outputs than its own" if differ(outputs, expected) else ""

    def _answers_otherwise_unmasked(self, main: Tensor, side: Mapping[str, Tensor]) -> bool:
        """Whether the outputs for texts without padding differ, or cannot be had, where no mask is given."""
        if MASK not in side:
            return False
        whole = self._run_by_unit(main, {**side, MASK: torch.ones_like(side[MASK])})
        try:
            return differ(self._run_by_unit(main, {key: side[key] for key in side if key != MASK}), whole)
        except Exception:  # a family of the user's own that knows no texts without a mask, say
            return True

    def _own_outputs(self, main: Tensor, side: Mapping[str, Tensor]) -> Tensor:
        with self.autocast():
            if main.is_floating_point() and not side:
                return logits_of(self.model(main.to(self.dtype)))
            given = {self.family.main_input: main, **side}
            told = self.model(**{key: x.to(self.dtype) if x.is_floating_point() else x for key, x in given.items()})
        return logits_of(told)

    def _run_by_unit(
        self, main: Tensor, side: Mapping[str, Tensor], *, proves: bool = False, row_only: bool = False
    ) -> Tensor:
        """Runs unit by unit and notes what leaves each.

        Args:
            proves: whether halves are proven on the way.
            row_only: whether the last block is computed for the head's row from now on.
        """
        hidden, self._leaving = main, []
        starts = {self.numbering.first_of(part) for part in range(1, self.num_blocks + 1)}
        for unit in range(self.num_units):
            with self.lent(self._units_of_block(unit), awake=True):
                if proves and self._halves is not None and unit in starts:
                    self._prove_halves(self._halves, unit, hidden, side)
                if row_only and unit == self.numbering.first_of(self.num_blocks):
                    self._narrow(unit, hidden, side)
                hidden = self.run(range(unit, unit + 1), hidden, side)
            one_row = 0 < self._narrowing <= unit
            by_length = not main.is_floating_point() and hidden.dim() == 3 and not one_row
            self._leaving.append((tuple(hidden.shape[1:]), by_length, hidden.dtype))
        return hidden

    def _lent_block(self, index: int) -> AbstractContextManager[None]:
        return self.lent(self._units_of_block(self.numbering.first_of(index + 1)), awake=True)

    def _units_of_block(self, unit: int) -> range:
        """The units of the block that ``unit`` is of; of the stem or of the head, itself."""
        first = self.numbering.first_of(self.numbering.part_of(unit))
        return range(first, min(first + self.numbering.units_per_block, self.num_units) if first else 1)

    def _prove_halves(self, halves: Halves, unit: int, hidden: Tensor, side: Mapping[str, Tensor]) -> None:
        """Refuses halves that differ from their block, which begins with ``unit``.

        Note: for every block, because the blocks of a model need not be alike.
        """
        block = self.blocks[self.numbering.part_of(unit) - 1]
        with self.autocast():
            arguments = self._of_block(unit, self.family.block_arguments(self.model, hidden, side))
            try:
                differs = halves_differ(halves, block, hidden, arguments=arguments)
                found = "other outputs than the whole" if differs else ""
            except Exception as error:  # a block that is wired in another way lacks modules, say
                found = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if found:
            raise indivisible(self.name, found)

    def _narrow(self, unit: int, hidden: Tensor, side: Mapping[str, Tensor]) -> None:
        """Computes the last block for the head's row from now on, where that is proven to be the same.

        Args:
            unit: the last block, or its attention half.
        """
        block, halves, row = self.blocks[-1], self.family.halves, self.family.row
        if halves is None or halves.attention_of_row is None or row is None:
            return
        with self.autocast():
            arguments = self._of_block(unit, self.family.block_arguments(self.model, hidden, side))
            try:
                if row_differs(halves, block, hidden, row(hidden, side), arguments=arguments):
                    return
            except Exception:  # a block that is wired in another way lacks modules, say: it is computed whole
                return
        attention, mlp = partial(halves.attention_of_row, block), partial(halves.mlp, block)

        def both(hidden: Tensor, **arguments: Any) -> Tensor:
            return mlp(attention(hidden, **arguments))

        self._bodies[unit - 1] = both if self._halves is None else attention
        self._narrowing = unit

    def boundary(self, unit: int, *, rows: int, length: int) -> Tensor:
        """A meta tensor like the output of ``unit`` for ``rows`` samples of padded length ``length``.

        Raises:
            IndexError: before ``learn_shapes``.
        """
        shape, by_length, dtype = self._leaving[unit]
        shape = (length, *shape[1:]) if by_length else shape
        return torch.empty((rows, *shape), dtype=dtype, device="meta")

    def alike(self) -> list[int]:
        """The first unit that computes as each does, with other weights [num_units]."""
        first: dict[object, int] = {}
        found = []
        for unit in range(self.num_units):
            part = self.numbering.part_of(unit)
            told: object = unit
            if 1 <= part <= self.num_blocks:
                block = self.blocks[part - 1]
                sizes = [(name, parameter.shape) for name, parameter in block.named_parameters()]
                half = unit - self.numbering.first_of(part)
                told = (repr(block), str(sizes), half, self._leaving[unit - 1], self._leaving[unit])
            found.append(first.setdefault(told, unit))
        return found

    def leaves_one_row(self, boundary: int) -> bool:
        """Whether one row of each sample is left behind ``boundary`` blocks, where the head reads no other."""
        return 0 < self._narrowing < self.numbering.behind(boundary)

    def check_leaving(self, leaving: Tensor, *, unit: int, hidden: Tensor) -> None:
        """Refuses an output of another shape than the static one of ``boundary`` (of a model that drops patches, say).

        Note: gloo would keep old rows where a neighbour sends fewer than it announced, without an error.

        Args:
            leaving: output of ``unit``.
            hidden: input of the stage [rows, length, ...].
        """
        shape, by_length, _ = self._leaving[unit]
        expected = (hidden.shape[0], *((hidden.shape[1], *shape[1:]) if by_length else shape))
        if leaving.shape != expected:
            raise UserError(
                f"model.kwargs: unit {unit} of {self.name} gave {list(leaving.shape)} in training and "
                f"{list(expected)} in evaluation; leave out what drops patches or tokens"
            )
