"""A job as it lies on a share: where, what is new, its records, its state, and who relays it."""
