"""What keeps clusters in order: doctor and gc."""
