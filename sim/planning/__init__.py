"""The questions that people ask."""
