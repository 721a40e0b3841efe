"""Costs of a graph's units as a file, for the next run of the same model and shape on the same kind of device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from pydantic import TypeAdapter

from pipetransformer.errors import UserError
from pipetransformer.graphs.graph.profile import GraphCosts
from pipetransformer.pipe.measure.profile_file import file_name, read_fields, write_profile


def kept_costs(key: Mapping[str, object], *, folder: Path, measure: Callable[[], GraphCosts]) -> GraphCosts:
    """The costs that ``folder`` keeps under ``key``, or else those of ``measure``, kept from then on."""
    path = folder / file_name({"graph": dict(key)})
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return TypeAdapter(GraphCosts).validate_python(read_fields(path)["costs"])
    costs = measure()
    with contextlib.suppress(UserError):  # no place to keep it: the next run measures anew
        write_profile(path, {"key": dict(key), "costs": asdict(costs)})
    return costs
