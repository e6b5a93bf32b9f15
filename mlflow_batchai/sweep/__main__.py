"""``python -m mlflow_batchai.sweep RUN_ID``: the detached process that drives a sweep."""

from mlflow_batchai.sweep.driver import main

main()
