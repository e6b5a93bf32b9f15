"""What a job's scripts have said by ``mlflow.*`` (``training/tracking``) goes into the job's run."""
