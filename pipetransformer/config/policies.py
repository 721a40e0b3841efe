"""The registry of freeze policies, and the policy that a configuration names, checked before any rank starts.

A policy is imported when it is used. ``docs/extending.md`` shows how to add one, or to name one's own.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError, create_model

from pipetransformer.config.registry import CLASS_PATH, Registry, resolve
from pipetransformer.config.types import Section
from pipetransformer.config.words import explain
from pipetransformer.errors import UserError

if TYPE_CHECKING:
    from pipetransformer.config.freezing import FreezeConfig


POLICIES: Registry[str | None] = Registry(
    {
        "none": None,
        "static": "pipetransformer.freeze.static:StaticPolicy",
        "schedule": "pipetransformer.freeze.schedule:SchedulePolicy",
        "paper": "pipetransformer.freeze.paper:PaperPolicy",
        "percentile": "pipetransformer.freeze.percentile:PercentilePolicy",
        "plasticity": "pipetransformer.freeze.plasticity:PlasticityPolicy",
        "top_down": "pipetransformer.freeze.top_down:TopDownPolicy",
        "guarded": "pipetransformer.freeze.guarded:GuardedPolicy",
    },
    key="freeze.policy",
    also="package.module:Class",
)

_OPTIONS = "freeze.options"
_NEEDS = {"decide": "a method", "needs_norms": "true or false", "may_unfreeze": "true or false"}


def chosen_policy(freeze: FreezeConfig) -> tuple[Any, Section] | None:
    """The policy's class and its options; None for ``none``.

    A policy that comes with us takes its options from the keys of ``freeze``, another from ``freeze.options``.

    Raises:
        UserError: naming ``freeze.policy`` or the option.
    """
    name, options = freeze.policy, freeze.options
    if CLASS_PATH.fullmatch(name):
        policy = _imported(name)
        return policy, _checked(policy.Options, options)
    path = POLICIES[name]
    if options:
        raise UserError(
            f"{_OPTIONS}: policy {name} has none; leave it out, or give freeze.policy a package.module:Class"
        )
    if path is None:
        return None
    policy = resolve(path)
    own = {key: getattr(freeze, key) for key in policy.Options.model_fields}
    return policy, policy.Options.model_validate(own)


def _imported(path: str) -> Any:
    """The user's own class, which may lie in the working directory. Raises UserError."""
    # Note: a rank runs main_xx.py, so that its path begins with that file's folder, the launcher's with this one. It
    # stays on the path: the user's module may import its neighbours later.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    module, _, name = path.partition(":")
    try:
        policy = getattr(importlib.import_module(module), name, None)
    except Exception as error:  # whatever the user's module raises
        said = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise _refused(path, f"{module} cannot be imported from {os.getcwd()} ({said})") from error
    if policy is None:
        raise _refused(path, f"{module} has no class {name}")
    if not isinstance(policy, type):
        raise _refused(path, f"{name} is no class")
    for need, words in _NEEDS.items():
        found = getattr(policy, need, None)
        if not (callable(found) if need == "decide" else isinstance(found, bool)):
            raise _refused(path, f"a policy needs {need}, {words}")
    if not _takes_signals(policy):
        raise _refused(path, "decide must take one argument, the signals")
    if not (isinstance(options := getattr(policy, "Options", None), type) and issubclass(options, Section)):
        raise _refused(path, "a policy needs Options, a class of pipetransformer.config.Section")
    return policy


def _takes_signals(policy: type) -> bool:
    try:
        inspect.signature(policy.decide).bind(object(), object())  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        return False
    return True


def _refused(path: str, why: str) -> UserError:
    return UserError(f"{POLICIES.key}: {path} is not allowed; {why}")


def _checked(model: type[Section], options: dict[str, Any]) -> Section:
    # As the section that it is in the file, so that a mistake is told with its whole key.
    whole = create_model("Options", **{_OPTIONS: (model, ...)})  # type: ignore[call-overload]
    values = {_OPTIONS: options}
    try:
        checked: Section = getattr(whole.model_validate(values), _OPTIONS)
    except ValidationError as error:
        raise UserError(explain(error, schema=whole, values=values)) from None
    return checked
