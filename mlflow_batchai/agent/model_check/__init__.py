"""On node 0, after the ranks have succeeded: choose the job's model, load it and let it predict once."""
