"""Sweeps: one project run with many sets of parameters, as jobs whose runs stand under one parent run."""
