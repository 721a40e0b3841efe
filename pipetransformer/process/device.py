"""The device of this rank: its name, its memory, its clock."""

from __future__ import annotations

import contextlib
import platform
import resource
import sys
from pathlib import Path
from time import perf_counter_ns

import torch


def device_name(device: torch.device) -> str:
    """Of the GPU or the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")
    return f"{platform.machine()} {name}"


def has_bfloat16(device: torch.device) -> bool:
    """Whether it has instructions for products of bfloat16 numbers; otherwise they are slower than float32's."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    with contextlib.suppress(OSError):
        flags = set(Path("/proc/cpuinfo").read_text().split())
        return bool(flags & {"amx_bf16", "avx512_bf16", "bf16"})  # Intel's, AMD's, and Arm's
    return False


def device_memory(device: torch.device) -> int | None:
    """Bytes of a GPU that plans may fill, without a tenth that they do not count; None on a CPU."""
    return int(0.9 * torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else None


def reset_peak_memory(device: torch.device) -> None:
    """Starts the peak anew, so that set-up (every rank holds the whole model, all layouts are tried) does not count."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with contextlib.suppress(OSError):  # Linux has it; elsewhere set-up counts
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory that this rank held: on its GPU, or resident (a shared store counts in full) on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def seed(device: torch.device, number: int) -> None:
    """Seeds the random numbers of the CPU and of ``device``: those that ``torch.manual_seed`` gives.

    Note: that function seeds every kind of device, and formats a traceback for each that is not in use: 0.1 ms a step.
    """
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(number)


def synchronize(device: torch.device) -> None:
    """Waits for all launched work on ``device``, so that a clock read next tells its time."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def now_ns(device: torch.device) -> int:
    """The clock in nanoseconds, after all launched work on ``device``."""
    synchronize(device)
    return perf_counter_ns()
