"""Results as something to look at or to load elsewhere."""
