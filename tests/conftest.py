"""What all tests share: four ranks, the folder of shared data, an environment without a network."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks import RankPool

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
_prepared = tempfile.TemporaryDirectory(prefix="pipetransformer_tests_")
os.environ["PIPETRANSFORMER_CACHE"] = _prepared.name


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def shared() -> Path:
    """Real data and models that lie beside the repository on some machines."""
    path = Path(__file__).resolve().parent.parent.parent / "shared"
    if not path.is_dir():
        pytest.skip(f"no data at {path}")
    return path
