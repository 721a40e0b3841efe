"""A saved model, found by the folder of its run or by its own."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from pipetransformer.config import Config, load_config
from pipetransformer.config.datasets import Task
from pipetransformer.errors import UserError

Which = Literal["best", "final"]


@dataclass(frozen=True, slots=True)
class Saved:
    """A saved model.

    Attributes:
        folder: its folder, in the format of timm, transformers or peft.
        task: the task that it was trained for.
        config: the configuration of its run; None for a folder that lies elsewhere.
        settings: its ``config.json``.
        base: name or folder of the model that its adapters belong to; None without adapters.
    """

    folder: Path
    task: Task
    config: Config | None
    settings: dict[str, Any]
    base: str | None


def find_saved(place: Path, *, which: Which = "best") -> Saved:
    """The model of a run (``model/best``, or ``model/final``), or the one that ``place`` holds itself.

    Raises:
        UserError: there is none.
    """
    if which not in get_args(Which):
        raise UserError(f"which: {which!r} is not allowed; give {' or '.join(get_args(Which))}")
    if not place.is_dir():
        raise UserError(f"{place}: there is no such folder; give that of a run, or of a saved model")
    model = place / "model"
    folder = next((path for path in (model / which, model / "final", place) if (path / "config.json").is_file()), None)
    if folder is None and (others := sorted(model.glob("*/config.json"))):
        raise UserError(f"{place}: holds {others[0].parent.relative_to(place)} alone; model.save kept no other weights")
    if folder is None:
        raise UserError(f"{place}: holds no model; give the folder of a run that has ended, or of a saved model")
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        adapters = folder / "adapter_config.json"
        base = json.loads(adapters.read_text())["base_model_name_or_path"] if adapters.is_file() else None
        task = _task(settings)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder}: its configuration cannot be read ({type(error).__name__}: {error})") from error
    run = next((path for path in folder.parents if (path / "config.yaml").is_file()), None)
    is_ours = run is not None and folder.parent == run / "model"
    config = load_config(run / "config.yaml", is_past=True) if is_ours and run is not None else None
    return Saved(folder, task, config, settings, base)


def _task(settings: dict[str, Any]) -> Task:
    if "module" in settings and "architectures" not in settings:
        raise UserError(
            f"it is a module of your own ({settings['module']}); pipetransformer.Run(...).model(module) loads it"
        )
    if "architecture" in settings and "pretrained_cfg" in settings:
        return "image_classification"
    kind = str((settings.get("architectures") or [""])[0])
    return "question_answering" if kind.endswith("ForQuestionAnswering") else "text_classification"
