"""LoRA by the peft library: two small trained matrices beside a linear layer whose own weights never train.

    y = W x + alpha / r  B A x          (Hu et al., arXiv 2106.09685, section 4.1)

peft puts its layers into the model in place, so that the model stays a chain. Stem and blocks train nothing else; the
head trains as ever, and is saved as peft saves further modules (``modules_to_save``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from functools import partial
from pathlib import Path

from torch import Tensor, nn

from pipetransformer.config import ALL_LINEAR, ModelConfig
from pipetransformer.errors import UserError
from pipetransformer.models.families import Family, family_of
from pipetransformer.models.weight_files import saved_tensors, write_weights

_OURS, _PEFTS = ".default.", "base_model.model."  # peft's name of the only adapter; what it writes before all names


class Adapters:
    """The adapters of ``model``, which get their places in it now.

    Attributes:
        fixed: names of the parameters that never train.

    Raises:
        UserError: for targets that match nothing, and for more blocks than there are.
    """

    def __init__(self, model: nn.Module, config: ModelConfig, *, name: str) -> None:
        from peft import LoraConfig, inject_adapter_in_model
        from transformers.pytorch_utils import Conv1D

        lora, family = config.lora, family_of(model, name=name)
        assert lora is not None
        self._model, self._head = model, _head_modules(model, family)
        blocks = list(model.get_submodule(family.blocks).children())
        if lora.blocks is not None and lora.blocks > len(blocks):
            raise UserError(f"model.lora.blocks: {name} has {len(blocks)} blocks; give at most {len(blocks)}")
        first = config.least_frozen(len(blocks))
        linear = {
            f"{family.blocks}.{number}.{path}": isinstance(module, Conv1D)
            for number, block in enumerate(blocks[first:], start=first)
            for path, module in block.named_modules()
            if isinstance(module, (nn.Linear, Conv1D))
        }
        targets = [path for path in linear if lora.targets == ALL_LINEAR or _is_meant(path, lora.targets)]
        for target in () if lora.targets == ALL_LINEAR else lora.targets:
            if not any(_is_meant(path, [target]) for path in linear):
                known = ", ".join(dict.fromkeys(path.rpartition(".")[2] for path in linear))
                raise UserError(f"model.lora.targets: {target} is no linear layer of {name}'s blocks; give of {known}")
        self._config = LoraConfig(
            r=lora.r,
            lora_alpha=lora.alpha,  # type: ignore[arg-type]
            lora_dropout=lora.dropout,
            target_modules=targets,
            fan_in_fan_out=any(linear[path] for path in targets),
            modules_to_save=None,
            base_model_name_or_path=config.name,
        )
        inject_adapter_in_model(self._config, model)
        self._config.target_modules = targets  # peft may have shortened them
        self.fixed = frozenset(
            parameter
            for parameter, _ in model.named_parameters()
            if _is_of_body(parameter, family) and _OURS not in parameter
        )

    def save(self, folder: Path, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Writes what ``PeftModel.from_pretrained(base, folder)`` reads: the adapters' weights and the head's.

        Args:
            weights: name and value of each parameter that may train, and of others, which are left out.
        """
        saved, kind = copy(self._config), type(self._model)
        saved.modules_to_save, saved.inference_mode = self._head, True
        base = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
        saved.save_pretrained(str(folder), auto_mapping_dict=base)
        like = {_saved_name(n): t for n, t in saved_tensors(self._model).items() if n not in self.fixed}
        named = ((_saved_name(name), weight) for name, weight in weights)
        write_weights(folder, (pair for pair in named if pair[0] in like), like=like, stem="adapter_model")


@contextmanager
def every_adapter_runs(model: nn.Module, *, name: str) -> Iterator[None]:
    """A context with a forward of ``model``. Raises UserError at its end for an adapter that took no part in it: its
    layer's weight is read by its neighbours, which do not call it, so that the adapter would learn nothing."""
    waiting = {path: module for path, module in model.named_modules() if hasattr(module, "lora_A")}
    targets = list(dict.fromkeys(path.rpartition(".")[2] for path in waiting))
    with ExitStack() as hooks:
        for path, module in list(waiting.items()):
            called = partial(_called, waiting, path)
            hooks.callback(module.register_forward_hook(called).remove)
        yield
    if waiting:
        silent = {path.rpartition(".")[2] for path in waiting}
        others = ", ".join(target for target in targets if target not in silent)
        raise UserError(
            f"model.lora.targets: {next(iter(waiting))} of {name} is never called, its weight is read in another way, "
            f"so that an adapter there would learn nothing; give {f'[{others}]' if others else 'other layers'}"
        )


def _called(waiting: dict[str, nn.Module], path: str, *_: object) -> None:
    waiting.pop(path, None)


def _is_meant(path: str, targets: Sequence[str]) -> bool:
    return any(path == target or path.endswith(f".{target}") for target in targets)


def _is_of_body(parameter: str, family: Family) -> bool:
    """Whether a parameter is of the stem or of a block."""
    return parameter.startswith((f"{family.blocks}.", *family.stem_prefixes))


def _head_modules(model: nn.Module, family: Family) -> list[str]:
    """Paths of the modules behind the last block, as few as have all of their parameters."""

    def found(module: nn.Module, path: str) -> Iterator[str]:
        names = [f"{path}{name}" for name, _ in module.named_parameters()]
        of_body = [_is_of_body(name, family) for name in names]
        if names and not any(of_body):
            yield path.rstrip(".")
        elif not all(of_body):
            for name, child in module.named_children():
                yield from found(child, f"{path}{name}.")

    return list(found(model, ""))


def _saved_name(name: str) -> str:
    return _PEFTS + name.replace(_OURS, ".")
