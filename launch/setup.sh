#!/bin/sh
# Makes the environment that the Makefile runs everything in:   launch/setup.sh VENV
#
# Finds a CPython 3.12, makes VENV with it, installs requirements.lock and, editable, this project. A stamp in VENV
# records what was installed from which pins, so that the next call does nothing until they change. PYTHON=... names
# the interpreter to use. Two calls at once take turns. Index, mirror and proxy are the caller's own pip and uv settings.
set -eu

venv=${1:?usage: launch/setup.sh VENV}
root=$(cd "$(dirname "$0")/.." && pwd)

fail() {
    echo "set-up: $*" >&2
    exit 1
}

# A real CPython 3.12 with venv; a pyenv shim that refuses fails here like any other that is not one.
is_python_312() {
    "$1" -c 'import sys, ensurepip, venv
sys.exit(sys.implementation.name != "cpython" or sys.version_info[:2] != (3, 12))' >/dev/null 2>&1
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        is_python_312 "$PYTHON" || fail "PYTHON=$PYTHON is not a CPython 3.12 with the venv module"
        echo "$PYTHON"
        return
    fi
    for candidate in python3.12 python3 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python \
        "$(uv python find --no-python-downloads 3.12 2>/dev/null || true)"; do
        if [ -n "$candidate" ] && is_python_312 "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "no CPython 3.12 with venv found (python3.12, python3, ~/.pyenv/versions/3.12*, uv): install it with" \
        "'apt install python3.12-venv', 'pyenv install 3.12' or 'uv python install 3.12', or set PYTHON=/path/to/python3.12"
}

# What the installed environment depends on: the pins, the entry points, and which clone the editable install points to.
fingerprint() {
    echo "$root"
    cat "$root/requirements.lock" "$root/requirements-dev.txt" "$root/requirements.txt" "$root/pyproject.toml"
}

main() {
    stamp=$venv/.hybridflow-stamp
    wanted=$(fingerprint | sha256sum | cut -d' ' -f1)
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
        return
    fi

    mkdir -p "$(dirname "$venv")"
    exec 9>"$venv.lock"
    flock -w 1800 9 || fail "another set-up has held $venv.lock for half an hour"
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
        return
    fi
    rm -f "$stamp"

    # An environment whose making was interrupted has an interpreter and no pip.
    if ! is_python_312 "$venv/bin/python" || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        python=$(find_python)
        echo "set-up: making $venv with $("$python" -c 'import sys; print(sys.executable)')"
        "$python" -m venv --clear "$venv"
    fi
    echo "set-up: installing requirements.lock (9 GB once; from the cache afterwards)"
    # The lock's own lines of uv: pip checks their hashes, and uv those of all others. Twice quiet, pip says what fails and
    # nothing about locations of the caller's own configuration that are not there.
    sed -n '/^uv==/,/^    # via/p' "$root/requirements.lock" >"$venv/uv.txt"
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check --require-hashes -r "$venv/uv.txt"
    "$venv/bin/python" -m uv pip install --quiet --python "$venv/bin/python" \
        --require-hashes -r "$root/requirements.lock"
    "$venv/bin/python" -m uv pip install --quiet --python "$venv/bin/python" \
        --no-deps --no-build-isolation --editable "$root"
    echo "$wanted" >"$stamp"
    rm -f "$venv.lock"
}

main
