"""Who may enter an engine's queue."""
