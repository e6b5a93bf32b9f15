"""MLflow in a rank: a tracking store, artifacts and logged models that become records of the job; imported by MLflow only."""
