"""What a person's process does with jobs: submit, watch, attach, retry, resize, find, show."""
