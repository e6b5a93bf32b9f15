"""Sweeps: one project run with many sets of parameters, as jobs whose runs are children of one parent run."""
