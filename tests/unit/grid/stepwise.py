"""An engine step by step, without a clock: logs short enough to be written by hand."""

from sim.core import EngineCore
from sim.policies.base import POLICIES, EngineLimits
from sim.request import Request


def engine(policy, num_gpu_blocks, max_model_len=64, **options):
    cls = POLICIES.load(policy)
    limits = EngineLimits(
        max_model_len=max_model_len, block_size=4, num_gpu_blocks=num_gpu_blocks, class_names=("all",)
    )
    return EngineCore(cls.build(cls.Options(policy=policy, **options), limits))


def log(core, arrivals, num_steps=10**6):
    """For each step who runs with how many tokens, whose KV goes for whom, who waits then, and the blocks in use.

    `arrivals`: which requests come before which step.
    """
    rows = []
    for index in range(num_steps):
        core.admit((), arrivals.get(index, ()))
        if index > max(arrivals) and not core.policy.num_unfinished:
            break
        step = core.plan(index)
        batch = " ".join(f"{r.id}{num_tokens}" for r, num_tokens in core.policy.batch(step))
        preempted = " ".join(f"{p.victim.id} for {p.beneficiary.id}" for p in step.preempted)
        waiting = "".join(r.id for r in core.policy.waiting())
        rows.append((batch, preempted, waiting, step.num_new_blocks, step.used_blocks))
        core.complete()
    core.policy.check_integrity()
    return rows


def request(name, prompt_tokens, output_tokens, *, queued_ns, priority=0):
    made = Request("abcdef".index(name), prompt_tokens, output_tokens, id=name, priority=priority)
    made.queued_ns = queued_ns
    return made
