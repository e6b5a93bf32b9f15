"""Mount a job's volumes on a node, and unmount them however the job ends."""
