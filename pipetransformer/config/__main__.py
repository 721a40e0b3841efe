"""Prints docs/config.md."""

from pipetransformer.config.schema import config_page

print(config_page(), end="")
