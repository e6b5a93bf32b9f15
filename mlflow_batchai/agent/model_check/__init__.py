"""On node 0, after the ranks' good end: choose the job's model, load it and have it predict once."""
