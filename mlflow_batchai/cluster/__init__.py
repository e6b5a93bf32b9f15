"""Clusters: find them by name, their record, the states of their nodes, their queue."""
