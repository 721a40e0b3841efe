"""YAML and command line as text: files, dotted overrides, and the way back."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml

from pipetransformer.errors import UserError

_KEY = re.compile(r"[^\s.]+(\.[^\s.]+)*")
# Note: PyYAML raises its own error for what it cannot parse, and any of these for a tag that its value does not fit.
_YAML_ERRORS = (yaml.YAMLError, ValueError, RecursionError, LookupError, AttributeError, TypeError)
_MOST_NODES = 10_000  # of a value, each alias counted as what it stands for


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice, where PyYAML would silently take the last, and aliases that grow without
    bounds."""

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None and _num_nodes(node, {}) > _MOST_NODES:
            problem = f"it has more than {_MOST_NODES:,} values, aliases (*name) counted as what they stand for"
            raise yaml.constructor.ConstructorError(problem=problem, problem_mark=node.start_mark)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        problem=f"{key.value} is given twice", problem_mark=key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def _num_nodes(node: yaml.Node, known: dict[int, float]) -> float:
    """Those of a node and all in it; infinitely many where it holds itself.

    Args:
        known: those of nodes that were counted before, by ``id``.
    """
    if id(node) in known:
        return known[id(node)]
    known[id(node)] = math.inf
    children: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        children = [child for pair in node.value for child in pair]
    elif isinstance(node, yaml.SequenceNode):
        children = node.value
    known[id(node)] = 1 + sum(_num_nodes(child, known) for child in children)
    return known[id(node)]


class _Dumper(yaml.SafeDumper):
    """Quotes what ``_Loader`` would not read as the same text."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        # Note: PyYAML folds a NEL (U+0085) between single quotes, and reads it as a space.
        return self.represent_scalar("tag:yaml.org,2002:str", data, style='"' if "\x85" in data else None)


_Dumper.add_representer(str, _Dumper.represent_str)

for _yaml_class in (_Loader, _Dumper):
    # Note: PyYAML follows YAML 1.1, where a float needs a point and a signed exponent: 1e-3 would be text.
    _yaml_class.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
    )


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The file's mapping of sections. Raises UserError with file and line."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; give the path of a YAML configuration") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a text file; give the path of a YAML configuration") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    try:
        values = yaml.load(text, _Loader)
    except _YAML_ERRORS as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else f"{path}"
        raise UserError(f"{where}: malformed YAML ({_problem(error)})") from None
    if not isinstance(values, dict):
        found = "empty" if values is None else "no mapping of sections"
        raise UserError(f"{path}: {found}; a configuration has at least task, model, data and train")
    return values


def parse_override(text: str, *, text_keys: Collection[str]) -> tuple[str, Any]:
    """Split ``section.key=value``; the value is YAML, except that a key of ``text_keys`` takes 1000 or 1e5 as text."""
    key, equals, raw = text.partition("=")
    if not equals or not _KEY.fullmatch(key):
        raise UserError(f"{' '.join(text.split())}: not an override; write section.key=value")
    try:
        value = yaml.load(raw, _Loader)
    except _YAML_ERRORS as error:
        if key not in text_keys:
            raise UserError(f"{key}: malformed YAML in {raw!r} ({_problem(error)})") from None
        value = raw
    if key in text_keys and value is not None and not isinstance(value, str):
        value = raw
    return key, value


def set_key(values: dict[str, Any], key: str, value: object) -> None:
    """Set a dotted key, making the mappings on its way; a mapping as value replaces what was there."""
    *parents, name = key.split(".")
    for depth, parent in enumerate(parents, start=1):
        if values.get(parent) is None:
            values[parent] = {}
        values = values[parent]
        if not isinstance(values, dict):
            raise UserError(f"{key}: no such key; {'.'.join(parents[:depth])} is not a mapping")
    values[name] = value


def dump_yaml(values: dict[str, Any]) -> str:
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _problem(error: BaseException) -> str:
    """PyYAML's own words without its many lines."""
    text = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error) or type(error).__name__
    return " ".join(text.split())
