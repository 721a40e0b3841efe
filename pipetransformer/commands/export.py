"""Write the model of a run into a folder of its own, in its library's format, with a model card of its figures."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from pipetransformer.errors import UserError, writing

EXAMPLES = """examples:
  pipetransformer export runs/1000 my-model
  pipetransformer export runs/1000 my-model --final"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="RUN", type=Path, help="folder of a run")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="is made; it must not be there")
    parser.add_argument("--final", action="store_true", help="the last weights, not the best")


def run(arguments: argparse.Namespace) -> None:
    from pipetransformer.inference import find_saved
    from pipetransformer.inference.samples import label_column, text_columns

    run_dir, folder = arguments.model.expanduser(), arguments.folder.expanduser()
    saved = find_saved(run_dir, which="final" if arguments.final else "best")
    if saved.config is None:
        raise UserError(f"{run_dir}: is no run; give the folder of one")
    if folder.exists():
        raise UserError(f"{folder}: is there; give a folder that is not")
    with writing(folder, key="FOLDER"):
        shutil.copytree(saved.folder, folder)
        (folder / "README.md").write_text(_card(saved, run_dir), encoding="utf-8")
        if saved.task == "text_classification":
            told = saved.settings | {"text_columns": text_columns(saved), "label_column": label_column(saved)}
            (folder / "config.json").write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    print(f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")


def _card(saved: Any, run_dir: Path) -> str:
    """The model card, in the form of model hubs."""
    config = saved.config
    summary: dict[str, Any] = {}
    if (path := run_dir / "summary.json").is_file():
        summary = json.loads(path.read_text(encoding="utf-8"))
    is_image = saved.task == "image_classification"
    library = "timm" if is_image else "transformers"
    tag = {"image_classification": "image-classification", "text_classification": "text-classification"}
    best = summary.get("best_metrics") or {}
    metrics = "\n".join(f"| {name} | {value:.4f} |" for name, value in best.items())
    load = (
        'timm.create_model("local-dir:FOLDER", pretrained=True)'
        if is_image
        else f'{saved.settings["architectures"][0]}.from_pretrained("FOLDER")'
    )
    frozen = summary.get("transitions") or []
    froze = ", ".join(f"{move['frozen']} at step {move['step']}" for move in frozen)
    froze = f" (blocks frozen: {froze})" if froze else ""
    on_hub = config.model.pretrained and not Path(config.model.name).is_absolute()  # else a place of this machine
    base = f"base_model: {config.model.name}\n" if on_hub and not Path(config.model.name).is_dir() else ""
    is_own = config.data.name in ("table", "image_folder", "own")
    data = "" if is_own else f"datasets: [{config.data.name}]\n"
    return f"""---
library_name: {library}
pipeline_tag: {tag.get(saved.task, "question-answering")}
{base}{data}---

# {config.model.name} on {config.data.name}

Fine-tuned with PipeTransformer-next: {config.train.epochs} epochs of batches of {config.train.batch_size}, learning
rate {config.train.lr:g}, precision {config.train.precision}, freeze policy {config.freeze.policy}{froze}.

| metric | best evaluation |
|---|---|
{metrics}

```python
{load}
```

Every setting:

```yaml
{config.to_yaml().rstrip()}
```
"""
