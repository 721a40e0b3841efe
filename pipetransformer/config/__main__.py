"""Prints docs/config.md."""

from pipetransformer.config.page import config_page

print(config_page(), end="")
