"""The Python environments in which ranks run."""
