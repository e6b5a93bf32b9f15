"""A job folder as clients read it: paths, events, records, state, lease."""
