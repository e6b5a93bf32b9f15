"""Turn documents into a plan, before anything exists."""
