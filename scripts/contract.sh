#!/bin/sh
# What scripts say by MLflow, and how it calls us, with the oldest MLflow that pyproject.toml allows and the newest that pip can get: their packages
# are put aside in the user's cache, beside those that are installed. The installed version is always among them.
set -eu
bin=$1
cache=${XDG_CACHE_HOME:-$HOME/.cache}/mlflow-batchai/contract
oldest=$(sed -n 's/^ *"mlflow>=\([0-9.]*\),.*/\1/p' pyproject.toml)
newest=$("$bin/pip" index versions mlflow 2>/dev/null | sed -n '1s/.*(\(.*\)).*/\1/p')
found=
for version in "$oldest" "$newest"; do
    [ -n "$version" ] || continue
    case $version in *.*.*) ;; *) version=$version.0 ;; esac
    folder=$cache/mlflow-$version
    if [ ! -e "$folder/mlflow/version.py" ]; then
        # All of it lies in this one distribution; what it needs is installed.
        if ! "$bin/pip" install --quiet --no-deps --target "$folder" "mlflow==$version"; then
            echo "skipped: pip can't get mlflow $version" >&2
            rm -rf "$folder"
            continue
        fi
    fi
    found=$found${found:+:}$folder
done
CONTRACT_MLFLOW=$found exec "$bin/python" -m pytest tests/training/test_tracking_store.py tests/client/test_mlflow_calls.py
