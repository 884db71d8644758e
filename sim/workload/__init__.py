"""Who arrives, when, and with how many tokens."""
