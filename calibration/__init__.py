"""Measured kernels turned into cost artifacts."""
