"""Named random streams: what one subsystem draws never shifts what another one sees.

Two policies under one seed therefore meet identical arrivals, lengths and cancellations.
"""

from __future__ import annotations

import hashlib

import numpy as np


def stream(seed: int, name: str) -> np.random.Generator:
    """The generator of subsystem `name` (say `"traffic/chat/arrivals"`) under a scenario's seed."""
    digest = hashlib.sha256(name.encode()).digest()
    spawn_key = tuple(int.from_bytes(digest[i : i + 4], "big") for i in range(0, 16, 4))
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=spawn_key)))
