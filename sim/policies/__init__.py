"""Who runs in the next iteration."""
