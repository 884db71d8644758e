"""One engine for many schedulers: each is a preset that fixes the axes on which they differ."""
