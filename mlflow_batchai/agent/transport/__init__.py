"""What an agent sends: records, log lines and reports of its ranks, each once."""
