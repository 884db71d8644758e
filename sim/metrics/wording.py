"""How figures stand in sentences and tables."""

from __future__ import annotations


def percent(share: float | None, digits: int = 0) -> str:
    """A share as `87 %`; a dash where there is none."""
    return "–" if share is None else f"{100 * share:.{digits}f} %"
