"""A person's process and its jobs: submit, watch, attach, retry, resize, find, show."""
