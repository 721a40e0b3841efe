"""timm's script as a rank of several on a CPU: it hands DDP its device, which DDP refuses there (torch 2.15, timm 1.0).

torchrun --nproc-per-node N timm_ranks.py FILE ARGUMENT ...
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

_make = DistributedDataParallel.__init__


def _make_on_cpu(self: DistributedDataParallel, module: nn.Module, device_ids: object = None, **others: Any) -> None:
    _make(self, module, **others)


if __name__ == "__main__":
    DistributedDataParallel.__init__ = _make_on_cpu  # type: ignore[method-assign]
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
