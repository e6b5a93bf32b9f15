#!/usr/bin/env bash
# The demo: the CIFAR project on real digit images, two ranks on two nodes of this machine. Usage: demo.sh BIN FOLDER
set -euo pipefail
bin=$1 folder=$2
mkdir -p "$folder"
bin=$(cd "$bin" && pwd) project=$PWD/projects/cifar_horovod
# MLflow keeps artifacts in ./mlruns of where a store is first used.
cd "$folder"
began=$(date +%s)
"$bin/mlflow" run "$project" --backend batchai --env-manager local --run-name demo \
    -P data=digits -P epochs=12 -P augment=false \
    --backend-config '{"model": {"register": "cifar_horovod"}}'
"$bin/python" - "$began" "$bin/../.clock" "${MLFLOW_TRACKING_URI#sqlite:///}" <<'END'
import os, sqlite3, sys, time
began, clock, store = int(sys.argv[1]), *sys.argv[2:]
# setup.sh has written it, if it had anything to do.
parts = [line.split() for line in open(clock)] if os.path.exists(clock) else []
start, end = sqlite3.connect(store).execute("SELECT start_time, end_time FROM runs ORDER BY start_time DESC").fetchone()
parts += [("submit", start / 1000 - began), ("training", (end - start) / 1000), ("end", time.time() - end / 1000)]
parts = [(name, round(float(seconds))) for name, seconds in parts]
print("\nTime: " + ", ".join(f"{name} {seconds} s" for name, seconds in [*parts, ("all", sum(seconds for _, seconds in parts))]))
if os.path.exists(clock):
    os.remove(clock)
END
cat <<END

The run, its curves, logs, the saved .h5 and the registered model are in MLflow. To look at them:

    $bin/mlflow ui --backend-store-uri $MLFLOW_TRACKING_URI

and open http://127.0.0.1:5000/#/experiments?workflowType=machine_learning
END
