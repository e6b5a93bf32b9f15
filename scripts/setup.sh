#!/usr/bin/env bash
# Make a virtual environment with the pinned packages, this package, and a Horovod wheel. Usage: setup.sh VENV EXTRAS
# The rest of the packages is installed while Horovod compiles. What the parts took is kept in VENV/.clock, for demo.sh.
set -euo pipefail
venv=$1 extras=$2

if [ -z "${PYTHON:-}" ]; then
    echo "setup: Python 3.11, 3.12 or 3.13 is needed and none is on PATH; on Debian: apt-get install python3 python3-venv python3-dev" >&2
    exit 1
fi
python=$venv/bin/python
export PIP_DISABLE_PIP_VERSION_CHECK=1
install() { "$python" -m mlflow_batchai.agent install "$python" --quiet -c constraints.txt "$@"; }

if [ ! -x "$python" ]; then
    echo "setup: making $venv with $($PYTHON --version)"
    if ! "$PYTHON" -m venv "$venv"; then
        rm -rf "$venv"
        echo "setup: '$PYTHON -m venv' failed; on Debian: apt-get install python3-venv" >&2
        exit 1
    fi
fi
echo "setup: installing TensorFlow, and what Horovod needs"
install tensorflow-cpu cloudpickle psutil pyyaml packaging $(command -v cmake >/dev/null || echo "cmake<4")
echo "setup: packages: $SECONDS s" && echo "environment $SECONDS" >"$venv/.clock"

echo "setup: installing the other pinned packages (.[$extras])"
log=$(mktemp) && set -m # a process group of its own, that can be ended
install -e ".[$extras]" >"$log" 2>&1 &
others=$! && set +m
trap 'kill -- -$others 2>/dev/null || true; rm -f "$log"' EXIT
SECONDS=0 wheel=
if "$python" -c "import horovod.tensorflow" 2>/dev/null; then
    echo "setup: Horovod is there, and works"
else
    echo "setup: building a Horovod wheel meanwhile (about a minute on 2 idle cores; cached for the next time)"
    wheel=$("$python" -m mlflow_batchai.agent horovod-build --python "$python")
fi
wait $others || { cat "$log" >&2; exit 1; }
# The wheel's name is the same for every TensorFlow: put in the one that was built for this one.
[ -z "$wheel" ] || "$python" -m pip install --quiet --force-reinstall --no-deps "$wheel"
echo "setup: Horovod and other packages: $SECONDS s" && echo "wheel $SECONDS" >>"$venv/.clock"
echo "setup: ready"
