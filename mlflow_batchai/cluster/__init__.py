"""Clusters: by name, what changes of them, what their nodes do, and their queue."""
