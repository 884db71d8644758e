"""The prefix cache against one that gives every block a number and keeps all of them in one list."""

from collections import Counter
from random import Random

import pytest

from sim.kv.prefix import PrefixCache
from sim.request import Request, Status
from sim.tokens import BlockKeys, Run, TokenRuns

BLOCK_SIZE = 4


class PlainCache:
    """Block by block: a free list, owners, keys."""

    def __init__(self, num_blocks, *, keyless_to_front):
        self.free_list = list(range(num_blocks))
        self.keyless_to_front = keyless_to_front
        self.identities = BlockKeys(BLOCK_SIZE)
        self.owners, self.key_of, self.keys, self.held, self.num_published = Counter(), {}, {}, {}, {}
        self.num_evicted = 0
        self.carriers = {}

    def known(self, request, num):
        if request not in self.keys:
            self.keys[request] = self.identities.of(request.tokens, request.prompt_tokens)
        return self.keys[request].first(num)[:num]

    def lookup(self, request, max_blocks):
        blocks = []
        for key in self.known(request, max_blocks):
            if not self.carriers.get(key):
                break
            blocks.append(self.carriers[key][0])
        return blocks

    def admit(self, request, blocks):
        for block in blocks:
            if not self.owners[block]:
                self.free_list.remove(block)
            self.owners[block] += 1
        self.held[request], self.num_published[request] = list(blocks), len(blocks)

    def allocate(self, request, num_blocks):
        for _ in range(num_blocks):
            block = self.free_list.pop(0)
            if block in self.key_of:
                self.carriers[self.key_of.pop(block)].remove(block)
                self.num_evicted += 1
            self.owners[block] = 1
            self.held[request].append(block)

    def publish(self, request, num_tokens):
        num_full, blocks = num_tokens // BLOCK_SIZE, self.held[request]
        for index in range(self.num_published[request], num_full):
            key = self.known(request, num_full)[index]
            self.key_of[blocks[index]] = key
            self.carriers.setdefault(key, []).append(blocks[index])
        self.num_published[request] = max(self.num_published[request], num_full)

    def free(self, request):
        keyless = []
        for block in reversed(self.held.pop(request)):
            self.owners[block] -= 1
            if self.owners[block]:
                continue
            if block in self.key_of or not self.keyless_to_front:
                self.free_list.append(block)
            else:
                keyless.append(block)
        self.free_list[:0] = keyless


def a_request(rng, index):
    prompt_tokens = rng.randint(1, 30)
    runs = [Run(rng.choice("abc"), rng.randint(0, prompt_tokens))]
    runs.append(Run(rng.choice("ab"), rng.choice([0, prompt_tokens - runs[0].length])))
    tokens = TokenRuns(tuple(runs), rng.choice([None, "answer", "reply"]))
    return Request(index, prompt_tokens=prompt_tokens, output_tokens=100, max_tokens=100, tokens=tokens)


class Lives:
    """Requests that come, grow, are preempted and end, the same in both caches."""

    def __init__(self, rng, num_blocks, *, keyless_to_front):
        self.rng = rng
        self.cache = PrefixCache(num_blocks, BLOCK_SIZE, keyless_to_front=keyless_to_front)
        self.plain = PlainCache(num_blocks, keyless_to_front=keyless_to_front)
        self.waiting = []
        self.running = {}
        """Those who hold blocks, and how many tokens each has in them."""
        self.seen = Counter()

    def admit(self, request):
        num_tokens = request.num_tokens
        hit = self.cache.lookup(request, (num_tokens - 1) // BLOCK_SIZE)
        blocks = self.plain.lookup(request, (num_tokens - 1) // BLOCK_SIZE)
        assert len(hit.blocks) == len(blocks)
        assert hit.num_ownerless == sum(not self.plain.owners[block] for block in blocks)
        num_new = -(-num_tokens // BLOCK_SIZE) - len(blocks)
        if num_new + hit.num_ownerless > self.cache.free_blocks:
            self.waiting.append(request)
            return
        self.cache.admit(request, hit, num_new)
        self.plain.admit(request, blocks)
        self.plain.allocate(request, num_new)
        self.running[request] = num_tokens
        self.seen["hits"] += len(blocks)
        self.seen["own hits"] += max(0, len(blocks) - request.kv_state.keys.num_shared)
        self.publish(request)

    def grow(self):
        """Everybody has one more token, where blocks suffice for it."""
        growing = [r for r, num_tokens in self.running.items() if num_tokens % BLOCK_SIZE == 0]
        if len(growing) > self.cache.free_blocks:
            self.leave(self.rng.choice(list(self.running)), Status.RUNNING)
            return
        self.cache.allocate_each(growing)
        for request in growing:
            self.plain.allocate(request, 1)
        for request in self.running:
            self.running[request] += 1
            if self.rng.random() < 0.7:
                self.publish(request)

    def publish(self, request):
        num_tokens = self.running[request] - self.rng.randint(0, 1)
        self.cache.publish(request, num_tokens)
        self.plain.publish(request, num_tokens)

    def leave(self, request, status):
        num_tokens = self.running.pop(request)
        request.num_blocks = -(-num_tokens // BLOCK_SIZE)
        request.status = status
        self.cache.free(request)
        self.plain.free(request)
        if status is Status.RUNNING:
            request.num_output_tokens = num_tokens - request.prompt_tokens
            self.waiting.append(request)


@pytest.mark.parametrize("keyless_to_front", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_hits_and_evictions_are_equal(seed, keyless_to_front):
    rng = Random(seed)
    lives = Lives(rng, rng.choice([14, 30, 60]), keyless_to_front=keyless_to_front)
    for index in range(1500):
        if rng.random() < 0.2:
            lives.waiting.append(a_request(rng, index))
        if lives.waiting:
            lives.admit(lives.waiting.pop(rng.randrange(len(lives.waiting))))
        if lives.running:
            lives.grow()
        if lives.running and rng.random() < 0.2:
            request = rng.choice(list(lives.running))
            is_over = lives.running[request] > 40 or rng.random() < 0.6
            lives.leave(request, Status.OVER if is_over else Status.RUNNING)
        found = (lives.cache.free_blocks, lives.cache.num_evicted)
        assert found == (len(lives.plain.free_list), lives.plain.num_evicted)
    for request in list(lives.running):
        lives.leave(request, Status.OVER)
    lives.cache.check_drained()
    assert min(lives.seen["hits"], lives.seen["own hits"], lives.cache.num_evicted) > 10
