"""How many attributes the objects have that are looked at in every step."""

import pytest

from sim.clock import Clock
from sim.core import EngineCore
from sim.cost.base import Target
from sim.cost.roofline import Roofline, RooflineOptions
from sim.engine import Engine
from sim.gpu import load_gpu
from sim.model import load_model
from sim.policies.vllm_v1 import VllmV1
from sim.policies.vllm_v1_config import V1Config
from sim.record import Recorder

MAX_INLINE_ATTRIBUTES = 29
"""CPython 3.11 finds attributes by their place while there are no more (fewer than `SHARED_KEYS_MAX_SIZE`), else by
their name: one too many costs the fast planner a twentieth of a request's instructions, all in all."""


def objects() -> list[object]:
    roofline = Roofline.build(
        RooflineOptions(kind="roofline"), Target(load_model("llama-3.1-8b"), load_gpu("h100-sxm"), 1, 2.0)
    )
    policy, recorder = VllmV1(V1Config(num_gpu_blocks=100)), Recorder()
    core = EngineCore(policy)
    return [policy, core, Engine(Clock(), core, roofline, recorder), roofline, recorder]


@pytest.mark.parametrize("found", objects(), ids=lambda found: type(found).__name__)
def test_attributes_are_few_enough_to_be_found_by_their_place(found):
    assert len(vars(found)) <= MAX_INLINE_ATTRIBUTES
