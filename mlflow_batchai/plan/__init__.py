"""From documents to a plan, before anything exists."""
