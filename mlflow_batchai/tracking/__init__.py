"""The MLflow side of a job: its run, metrics, artifacts, outputs, logs, models and description."""
