"""What an import costs, and what it gives."""

import subprocess
import sys

import pytest

import sim

HEAVY = ("pandas", "matplotlib", "scipy", "pyarrow", "joblib", "torch")


@pytest.mark.parametrize("module", ["sim", "sim.engine", "sim.workload.base"])
def test_importing_loads_nothing_heavy(module: str):
    """Plots, tables and statistics are loaded by who asks for them."""
    code = f"import sys, {module}; print(*sorted(set(sys.modules).intersection({HEAVY!r})))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == []


def test_the_public_names_are_sorted_and_exist():
    names = list(getattr(sim, "__all__", ()))
    assert names == sorted(names)
    assert [name for name in names if not hasattr(sim, name)] == []
