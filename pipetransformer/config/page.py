"""The reference page of all keys, kept in ``docs/config.md``: ``python -m pipetransformer.config`` prints it."""

from __future__ import annotations

from pipetransformer.config.renamed import RENAMED
from pipetransformer.config.schema import Config
from pipetransformer.config.words import reference


def config_page() -> str:
    """docs/config.md."""
    head = (
        "# Configuration",
        "",
        "A configuration is a YAML file of sections. Any key can be set on the command line, after the file:",
        "`train.lr=1e-3`, `'model.kwargs={patch_size: 4}'`, `model.kwargs.patch_size=4`, `run.id=null`. The value is",
        "YAML; a mapping replaces the one in the file. A key that is not listed here is refused, but for an old name:",
        "; ".join(f"`{old}` is read as `{new}`" for old, new in RENAMED.items()) + ".",
    )
    return reference(Config, head=head, command="python -m pipetransformer.config > docs/config.md")
