#!/bin/sh
# Makes .venv with this project and all that it needs, or brings it up to date after a change of pyproject.toml.
set -eu
cd "$(dirname "$0")"

fail() {
    echo "error: $1" >&2
    exit 1
}

stamp=.venv/installed
if [ -e "$stamp" ] && [ -z "$(find pyproject.toml -newer "$stamp")" ]; then
    exit 0
fi
if ! [ -x .venv/bin/python ] || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    command -v python3 >/dev/null || fail "python3 is missing; install Python 3.10 or newer"
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        fail "$(python3 --version) is too old; install Python 3.10 or newer"
    python3 -c 'import ensurepip, venv' 2>/dev/null ||
        fail "python3 cannot make virtual environments; install its venv module (python3-venv on Debian and Ubuntu)"
    echo "making .venv"
    python3 -m venv .venv
fi
echo "installing into .venv (torch is large: some minutes the first time)"
.venv/bin/python -m pip install --quiet --editable '.[dev]' || fail "pip could not install; its message is above"
touch "$stamp"
