"""Block identities against the plain definition: equal tokens from position 0 to the end of the block."""

from hypothesis import given, settings
from hypothesis import strategies as st

from sim.tokens import BlockKeys, Run, TokenRuns

runs = st.lists(st.builds(Run, st.sampled_from("ab"), st.integers(0, 9)), max_size=4).map(tuple)


@st.composite
def texts(draw):
    prefix = draw(runs)
    shared = sum(run.length for run in prefix)
    own = draw(st.integers(0, 6))
    return TokenRuns(prefix, draw(st.sampled_from([None, "a", "c"]))), shared + own


def spelled_out(index, tokens, prompt_tokens, num_tokens):
    """The first tokens of a request, each as what makes it equal to another one."""
    words = [(run.stream, i) for run in tokens.prefix for i in range(run.length)]
    words += [("own prompt", index, i) for i in range(len(words), prompt_tokens)]
    answer = ("own answer", index) if tokens.output_stream is None else (tokens.output_stream,)
    return (words + [(*answer, i) for i in range(num_tokens)])[:num_tokens]


@settings(max_examples=300, deadline=None)
@given(st.lists(texts(), min_size=1, max_size=6), st.integers(1, 5), st.data())
def test_keys_are_equal_where_all_tokens_up_to_the_block_are(requests, block_size, data):
    space = BlockKeys(block_size)
    sequences = [space.of(*text) for text in requests]
    names = {}
    for _ in range(3):  # asked for bit by bit, in any order
        for index, (tokens, prompt_tokens) in enumerate(requests):
            num = data.draw(st.integers(0, 12))
            keys = sequences[index].first(num)[:num]
            words = spelled_out(index, tokens, prompt_tokens, num * block_size)
            for block, key in enumerate(keys):
                beginning = tuple(words[: (block + 1) * block_size])
                assert names.setdefault(beginning, key) == key
    assert len(set(names.values())) == len(names)


def test_the_first_own_token_ends_what_can_be_shared():
    space = BlockKeys(4)
    one, two = (space.of(TokenRuns((Run("g", 10),)), 20).first(5)[:5] for _ in range(2))
    assert [a == b for a, b in zip(one, two, strict=True)] == [True, True, False, False, False]
