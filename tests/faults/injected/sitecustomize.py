"""Loaded by every Python that has this folder in PYTHONPATH: the client's processes that a fault is meant for."""

import os

import strikes

if os.environ.get(strikes.VARIABLE):
    strikes.arm(os.environ[strikes.VARIABLE])
