"""Who may hold cache."""
