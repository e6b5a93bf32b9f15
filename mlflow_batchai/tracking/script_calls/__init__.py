"""Write the ``mlflow.*`` calls of a job's scripts (``training/tracking``) into the job's run."""
