"""Starts the benchmark of one GPU from anywhere: ``python benchmarks/gpu/run.py``. ``__main__.py`` describes it."""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    runpy.run_module("benchmarks.gpu", run_name="__main__", alter_sys=True)
