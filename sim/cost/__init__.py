"""What an iteration costs."""
