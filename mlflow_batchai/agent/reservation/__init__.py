"""How an agent gets its node: by its reservation in a cluster's queue, or from a scheduler that has granted it.

Files and keys on disk have the names of earlier versions (``tickets/``, ``book.json``, ``closed``): agents of those may run on
the same node, and must be seen and waited for.
"""
