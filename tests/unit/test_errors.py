"""Errors: what they say, and that they survive being made again, as SimPy and pickle do."""

import pickle

import pytest

from sim.errors import InvariantError, ScenarioError
from sim.scenario_errors import SeveralScenarioError

ERRORS = [
    ScenarioError("x.yaml: seed", "is missing", valid="a number", remedy="Add it."),
    SeveralScenarioError([ScenarioError("a", "is bad"), ScenarioError("b", "is worse")]),
    InvariantError("the batch is empty"),
]
MESSAGES = [
    "x.yaml: seed: is missing; a number. Add it.",
    "a: is bad.\nb: is worse.",
    "this is a bug in servesim: the batch is empty",
]


@pytest.mark.parametrize(("error", "message"), [*zip(ERRORS, MESSAGES, strict=True)])
def test_an_error_made_again_says_the_same(error: Exception, message: str):
    assert [str(e) for e in (error, type(error)(*error.args), pickle.loads(pickle.dumps(error)))] == [message] * 3
