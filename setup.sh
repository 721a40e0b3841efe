#!/bin/sh
# Makes .venv with this project and all that it needs, in the versions of constraints.txt where the package index has
# them; brings it up to date after a change of pyproject.toml or constraints.txt.
# Given a version of torch (sh setup.sh 2.11), or "newest", it makes .venv-torch-VERSION with that one instead.
set -eu
cd "$(dirname "$0")"

fail() {
    echo "error: $1" >&2
    exit 1
}

version=${1:-}
case $version in
    *[!0-9a-z.]*) fail "torch version $version is not allowed; give one like 2.11, or newest" ;;
esac
venv=.venv${version:+-torch-$version}
stamp=$venv/installed constraints=$venv/constraints.txt log=$venv/pip.log

install() {
    "$venv/bin/python" -m pip install --constraint "$constraints" --editable '.[dev]' >"$log" 2>&1
}

only_torch() {
    case $version in
        '' | newest) : ;;
        *) echo "torch==$version.*" ;;
    esac
}

if [ -e "$stamp" ] && [ -z "$(find pyproject.toml constraints.txt -newer "$stamp")" ]; then
    exit 0
fi
if ! [ -x "$venv/bin/python" ] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    command -v python3 >/dev/null || fail "python3 is missing; install Python 3.10 or newer"
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        fail "$(python3 --version) is too old; install Python 3.10 or newer"
    python3 -c 'import ensurepip, venv' 2>/dev/null ||
        fail "python3 cannot make virtual environments; install its venv module (python3-venv on Debian and Ubuntu)"
    echo "making $venv"
    python3 -m venv "$venv"
fi
echo "installing into $venv (torch is large: some minutes the first time)"
if [ -z "$version" ]; then
    cp constraints.txt "$constraints"
else
    { grep -v -e '^torch==' -e '^torchvision==' constraints.txt; only_torch; } >"$constraints"
fi
if ! install; then
    # What pip says where no version satisfies a constraint, alone or beside what other packages need.
    lacking=$(sed -n -e 's/.*(constraint) \([^ ]*==[^ ]*\).*/\1/p' \
        -e 's/.*No matching distribution found for \([^ ]*==[^ ]*\).*/\1/p' "$log" | sort -u | tr '\n' ' ')
    if [ -n "$lacking" ]; then
        echo "note: pip cannot install ${lacking}here, as tested (constraints.txt); taking the ranges of pyproject.toml"
        only_torch >"$constraints"
        install || lacking=
    fi
    if [ -z "$lacking" ]; then
        grep -v '^ *$' "$log" | tail -n 20 >&2
        fail "pip could not install; its message is above"
    fi
fi
touch "$stamp"
