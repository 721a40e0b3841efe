"""A pydantic schema in words: what a key allows, what is wrong with a value, and the reference page.

All three come from the same annotations, so that an error, the documentation and the check cannot disagree.
"""

from __future__ import annotations

import difflib
import json
import reprlib
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from pipetransformer.config.foreign import not_here, ours
from pipetransformer.config.registry import Registry

_NOUNS = {
    **{int: "a whole number", float: "a number", bool: "true or false", str: "text", dict: "a mapping"},
    list: "a list",
}
_BOUNDS = ((Gt, "gt", "above"), (Ge, "ge", "of at least"), (Lt, "lt", "below"), (Le, "le", "at most"))


class Roof:
    """Says of an upper bound that it is so far up that nobody needs to be told of it who is below."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """Words for a type whose annotation alone does not tell what may be written. Goes into ``Annotated``."""

    words: str


def allowed(hint: Any, metadata: Sequence[object] = ()) -> str:
    """The values that ``hint`` takes, in words: ``a number above 0 and below 1``."""
    for mark in metadata:
        if isinstance(mark, Registry):
            return mark.allowed
        if isinstance(mark, Allowed):
            return mark.words
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return allowed(arguments[0], [*hint.__metadata__, *metadata])
    if origin in (Union, types.UnionType):
        return ", or ".join(allowed(argument) for argument in arguments)
    if origin is Literal:
        return str(arguments[0]) if len(arguments) == 1 else f"one of {', '.join(map(str, arguments))}"
    if origin is tuple:
        return f"a list of {len(arguments)}, each {allowed(arguments[0])}"
    if hint is type(None):
        return "null"
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        required = [name for name, field in hint.model_fields.items() if field.is_required()]
        return f"a section with {', '.join(required)}" if required else "a section of keys"
    bounds = [
        f"{word} {getattr(mark, name)}"
        for mark in metadata
        for kind, name, word in _BOUNDS
        if isinstance(mark, kind) and not (name == "le" and Roof in metadata)
    ]
    # A user's own policy may have options of any type.
    noun = str(_NOUNS.get(origin or hint) or getattr(hint, "__name__", hint))
    return " ".join([noun, " and ".join(bounds)]).rstrip()


def explain(error: ValidationError, *, schema: type[BaseModel], values: Mapping[str, Any]) -> str:
    """The first mistake in ``values``, in one line. A misspelt key comes first: it explains a missing one."""
    unknown = ("extra_forbidden", "invalid_key")
    first = min(error.errors(include_url=False), key=lambda mistake: mistake["type"] not in unknown)
    if first["type"] in unknown:
        return _explain_unknown([" ".join(str(part).split()) for part in first["loc"]], schema=schema)
    path, fields = list[int | str](), schema.model_fields
    for part in first["loc"]:
        if part not in fields:  # what follows points into a value: its key is what the user can look up
            break
        path.append(part)
        field = fields[str(part)]
        fields = _fields(field.annotation)
    key = " ".join(".".join(map(str, path)).split())
    expected = allowed(field.annotation, field.metadata)
    if first["type"] == "missing":
        return f"{key}: missing; give {expected}"
    given: Any = values
    for part in path:
        given = given[part]
    if first["type"] == "less_than_equal" and " at most " not in expected:
        expected += f", at most {first['ctx']['le']}"
    near = next((mark.near(given) for mark in field.metadata if isinstance(mark, Registry)), "")
    return f"{key}: {_quote(given)} is not allowed; give {expected}{near}"


def reference(schema: type[BaseModel], *, head: Sequence[str], command: str) -> str:
    """The documentation of every key, as Markdown.

    Args:
        head: lines above the tables.
        command: the command that writes the page.
    """
    lines = [*head, "", f"This page is written by `{command}`: edit the schema, not the page."]
    if top := [(name, field) for name, field in schema.model_fields.items() if not _fields(field.annotation)]:
        lines += ["", *_table(top)]
    for name, field in schema.model_fields.items():
        if fields := _fields(field.annotation):
            lines += ["", f"## `{name}`: {field.description}", "", *_table(fields.items())]
    return "\n".join(lines) + "\n"


def keys_of(schema: type[BaseModel]) -> list[tuple[str, str]]:
    """Every dotted key that takes a value, with its meaning and its default, as plain text."""
    found = []
    for key, field in _leaves(schema):
        default = "required" if field.is_required() else _plain(field.get_default(call_default_factory=True))
        found.append((key, f"{field.description} [{default}]".replace("`", "")))
    return found


def text_keys(schema: type[BaseModel]) -> frozenset[str]:
    """The dotted keys whose value is free text."""
    return frozenset(key for key, field in _leaves(schema) if _takes_text(field.annotation))


def _takes_text(hint: Any) -> bool:
    if get_origin(hint) in (Annotated, Union, types.UnionType):
        return any(_takes_text(argument) for argument in get_args(hint))
    return hint is str


def _explain_unknown(path: Sequence[str], *, schema: type[BaseModel]) -> str:
    *parents, name = path
    key, parent, names = ".".join(path), ".".join(parents), schema.model_fields
    for section in parents:
        names = _fields(names[section].annotation)
    prefix = f"{parent}." if parent else ""
    if reason := not_here(name):
        return f"{key}: no such key; {reason}"
    if (known := ours(name)) and known in {leaf for leaf, _ in _leaves(schema)}:
        return f"{key}: no such key; did you mean {known}?"
    if near := difflib.get_close_matches(name.lower(), names, n=1):
        return f"{key}: no such key; did you mean {prefix}{near[0]}?"
    elsewhere = {leaf.rpartition(".")[2]: leaf for leaf, _ in _leaves(schema)}
    if near := difflib.get_close_matches(name.lower(), elsewhere, n=1, cutoff=0.8):
        return f"{key}: no such key; did you mean {elsewhere[near[0]]}?"
    return f"{key}: no such key; {parent or 'a configuration'} has {', '.join(names)}"


def _fields(hint: Any) -> dict[str, FieldInfo]:
    """The fields of a section, or of one that may be null; none where ``hint`` is a plain value."""
    if get_origin(hint) in (Union, types.UnionType):
        hint = get_args(hint)[0]
    return hint.model_fields if isinstance(hint, type) and issubclass(hint, BaseModel) else {}


def _leaves(schema: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    return (leaf for leaf in _with_nested(schema.model_fields.items()) if not _fields(leaf[1].annotation))


def _with_nested(fields: Iterable[tuple[str, FieldInfo]]) -> Iterator[tuple[str, FieldInfo]]:
    """All of ``fields``, each followed by those of its section, where it is one, under dotted keys."""
    for name, field in fields:
        yield name, field
        nested = _fields(field.annotation).items()
        yield from _with_nested((f"{name}.{key}", inner) for key, inner in nested)


def _table(fields: Iterable[tuple[str, FieldInfo]]) -> Iterator[str]:
    yield "| key | allowed | default | meaning |"
    yield "|---|---|---|---|"
    for name, field in _with_nested(fields):
        default = "required" if field.is_required() else f"`{_plain(field.get_default(call_default_factory=True))}`"
        yield f"| `{name}` | {allowed(field.annotation, field.metadata)} | {default} | {field.description} |"


def _plain(value: object) -> str:
    """A default as one would write it in YAML."""
    return str(value) if not isinstance(value, (bool, tuple, type(None))) else json.dumps(value)


def _quote(value: object) -> str:
    """The given value as YAML shows it, on one line and short; text is quoted, so that "3" is not 3."""
    try:
        text = json.dumps(value, ensure_ascii=False, skipkeys=True, default=str)
    except ValueError:  # a mapping that contains itself
        text = reprlib.repr(value)
    text = " ".join(text.split())
    return text if len(text) <= 80 else f"{text[:77]}..."
