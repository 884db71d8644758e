"""The twins' comparison can fail: it catches mutations of one token in the rules that both planners share."""

import importlib
import sys
import types
from pathlib import Path
from random import Random

import pytest

import sim.policies
from sim.errors import InvariantError
from sim.policies.vllm_v1 import VllmV1
from sim.policies.vllm_v1_reference import VllmV1Reference
from tests.differential.lives import random_life
from tests.differential.lockstep import Lockstep

NUM_LIVES = 40
SHARED = ("sim.policies.vllm_v1_config", "sim.policies.vllm_v1_state")
"""What is not copied: what planners are told and what they keep, no decisions."""
MUTATIONS = {
    "victims go to the back of the queue": ("self._waiting.appendleft(victim)", "self._waiting.append(victim)"),
    "admission after a preemption": ("if waiting and not plan.preempted:", "if waiting:"),
    "one slot too many": ("len(running) < max_running", "len(running) <= max_running"),
}
"""What a rule's source says, and what it says when it is broken."""


def modules_with(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A second copy of the V1 planners' modules in which the only `old` of their source reads `new`."""
    folder = Path(sim.policies.__file__).parent
    [path] = [path for path in sorted(folder.glob("vllm_v1*.py")) if old in path.read_text()]
    source = path.read_text()
    assert source.count(old) == 1
    for name in [name for name in sys.modules if name.startswith("sim.policies.vllm_v1") and name not in SHARED]:
        monkeypatch.setattr(sim.policies, name.rpartition(".")[2], sys.modules[name])
        monkeypatch.delitem(sys.modules, name)
    mutated = types.ModuleType(f"sim.policies.{path.stem}")
    monkeypatch.setitem(sys.modules, mutated.__name__, mutated)
    exec(compile(source.replace(old, new), path, "exec"), mutated.__dict__)
    return importlib.import_module("sim.policies.vllm_v1")


def lives_that_differ(planner: type[VllmV1Reference]) -> int:
    """In how many lives a planner does otherwise than the plain one, or breaks an invariant."""
    count = 0
    for seed in range(NUM_LIVES):
        life = random_life(Random(seed))
        ours = Lockstep(life, VllmV1Reference(life.config)).sights()
        try:
            theirs = list(Lockstep(life, planner(life.config)).sights())
        except InvariantError:
            count += 1
        else:
            count += theirs != list(ours)
    return count


def test_a_second_copy_without_a_mutation_agrees(monkeypatch):
    old, _ = next(iter(MUTATIONS.values()))
    copy = modules_with(old, old, monkeypatch)
    assert copy.VllmV1 is not VllmV1
    assert lives_that_differ(copy.VllmV1) == 0


@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS)
@pytest.mark.parametrize("planner", ["VllmV1", "VllmV1Reference"])
def test_mutation_is_caught(monkeypatch, mutation, planner):
    mutated = modules_with(*mutation, monkeypatch)
    assert lives_that_differ(getattr(mutated, planner)) > 0
