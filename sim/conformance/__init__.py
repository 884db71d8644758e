"""The golden-log driver: the same core as in a simulation, one engine call per step of a real engine's log."""
