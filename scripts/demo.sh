#!/usr/bin/env bash
# The demo: the CIFAR project on real digit images, two ranks on two nodes of this machine. Usage: demo.sh BIN FOLDER
set -euo pipefail
bin=$1 folder=$2
mkdir -p "$folder"
bin=$(cd "$bin" && pwd) project=$PWD/projects/cifar_horovod
# MLflow keeps artifacts in ./mlruns of where a store is first used.
cd "$folder"
"$bin/mlflow" run "$project" --backend batchai --run-name demo \
    -P data=digits -P epochs=12 -P augment=false \
    --backend-config '{"model": {"register": "cifar_horovod"}}'
cat <<END

The run, its curves, logs, the saved .h5 and the registered model are in MLflow. To look at them:

    $bin/mlflow ui --backend-store-uri $MLFLOW_TRACKING_URI

and open http://127.0.0.1:5000
END
