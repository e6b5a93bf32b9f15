"""How an agent gets its node: by a reservation in the cluster's queue, or granted by a scheduler.

Files and keys on disk have the names of earlier versions (``tickets/``, ``book.json``, ``closed``): agents of those may run on
the same node, and must be seen and waited for.
"""
