"""Maintenance of clusters: ``doctor`` and ``gc``."""
