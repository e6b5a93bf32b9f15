"""What users write: the Batch AI job and cluster documents and batchai.yaml, as frozen pydantic models."""
