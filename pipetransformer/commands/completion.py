"""Print what makes a shell complete commands, options and keys: bash, zsh or fish. By argcomplete."""

from __future__ import annotations

import argparse

EXAMPLES = """examples:
  eval "$(pipetransformer completion bash)"          in ~/.bashrc
  eval "$(pipetransformer completion zsh)"           in ~/.zshrc
  pipetransformer completion fish > ~/.config/fish/completions/pipetransformer.fish"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))


def run(arguments: argparse.Namespace) -> None:
    from argcomplete.shell_integration import shellcode

    print(shellcode(["pipetransformer"], shell=arguments.shell))
