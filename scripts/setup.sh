#!/usr/bin/env bash
# Make a virtual environment with the pinned packages, this package, and a Horovod wheel. Usage: setup.sh VENV EXTRAS
set -euo pipefail
venv=$1 extras=$2

if [ -z "${PYTHON:-}" ]; then
    echo "setup: Python 3.11, 3.12 or 3.13 is needed and none is on PATH; on Debian: apt-get install python3 python3-venv python3-dev" >&2
    exit 1
fi
if [ ! -x "$venv/bin/python" ]; then
    echo "setup: making $venv with $($PYTHON --version)"
    if ! "$PYTHON" -m venv "$venv"; then
        rm -rf "$venv"
        echo "setup: '$PYTHON -m venv' failed; on Debian: apt-get install python3-venv" >&2
        exit 1
    fi
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade pip -c constraints.txt
fi
echo "setup: installing the pinned packages (.[$extras]); the first time this takes minutes"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$extras]"
command -v cmake >/dev/null || "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt "cmake<4"
echo "setup: building a Horovod wheel (about 2 minutes on 2 cores; cached for the next time)"
wheel=$(PATH="$PWD/$venv/bin:$PATH" "$venv/bin/batchai" horovod build)
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt "$wheel"
# The wheel's name is the same for every TensorFlow: put in the one that was built for this one.
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --force-reinstall --no-deps "$wheel"
echo "setup: ready"
