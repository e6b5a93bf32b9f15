"""One attempt of a job on one node: its phases from preparation to the verdict."""
