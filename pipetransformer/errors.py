"""The one exception that a user's mistake raises: its message is the line that the user reads."""

from __future__ import annotations

__all__ = ["UserError"]


class UserError(Exception):
    """A mistake in a configuration, file or environment, told in one line that names the remedy."""
