"""What a round should draft."""
