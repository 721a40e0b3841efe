"""What can be told of a job before its ranks start, so that a mistake costs seconds: the run's folder, the files of the
data, the model's folder, and the number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipetransformer.config import Config
from pipetransformer.pipe.planner.checks import check_ranks

_LARGE = 2**28  # bytes: a file that takes seconds to read is left to the ranks


def check_early(config: Config, *, num_ranks: int) -> None:
    """Refuses what the ranks would refuse later; what they alone can see is left to them.

    Args:
        num_ranks: number of ranks, of one node.

    Raises:
        UserError: as the ranks would.
    """
    from pipetransformer.models.built import refuse_useless_folder
    from pipetransformer.run.folder import folder_of

    if not config.run.resume:
        folder_of(config)
    check_ranks(config, local_size=num_ranks)
    refuse_useless_folder(config.model.name)
    if config.data.path is not None:
        _check_files(config)


def _check_files(config: Config) -> None:
    from pipetransformer.data.reader import reader_of

    reader: Any = reader_of(config.data)
    if not isinstance(reader.location, Path):  # of a hub
        return
    files = [reader.file(split) for split in reader.splits] if hasattr(reader, "file") else []
    if all(path is None or path.stat().st_size < _LARGE for path in files):
        reader.label_names()
