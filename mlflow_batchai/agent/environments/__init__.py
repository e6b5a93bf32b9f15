"""The Python environment that ranks run in."""
