"""Real kernels on the CPU: that they compute what a decoder computes, however its tokens are cut into batches."""

import sys
from types import ModuleType

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from calibration import attention, timing  # noqa: E402
from calibration.attention import Batch, Row, TorchSdpa  # noqa: E402
from calibration.executor import Executor, build_executor, graph_sizes  # noqa: E402
from calibration.kernels import Decoder, KVCache, Shard  # noqa: E402
from calibration.operators import call_of, pages_needed, rows_of  # noqa: E402
from calibration.points import DENSE, SAMPLED, Point  # noqa: E402
from sim.errors import ArtifactError  # noqa: E402
from sim.model import load_model, parse_config  # noqa: E402

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
DENSE_SHARD = Shard(64, 4, 2, 16, 128, 100, num_layers=2, qkv_bias=True, qk_norm=True)
MOE_SHARD = Shard(64, 4, 2, 16, 32, 100, num_layers=2, num_experts=4, num_experts_per_tok=2)
TOKENS = [(7 * i) % 100 for i in range(40)]
TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 256,
}


def executor(shard: Shard = DENSE_SHARD, num_pages: int = 32) -> Executor:
    return Executor(Decoder(shard, CPU, torch.float32), num_pages, TorchSdpa())


def last_logits(own: Executor, batches: list[list[Row]], monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Logits of the rows sampled in the last of some iterations."""
    seen = []
    monkeypatch.setattr(own.decoder, "sampling", lambda logits: (seen.append(logits), logits.argmax(-1))[1])
    for rows in batches:
        own.run(rows)
    return seen[-1]


@pytest.mark.parametrize("shard", [DENSE_SHARD, MOE_SHARD], ids=["dense", "experts"])
def test_a_prompt_in_pieces_beside_others_gives_the_same_logits(shard: Shard, monkeypatch: pytest.MonkeyPatch):
    own = executor(shard)
    whole = last_logits(own, [[Row(TOKENS, 0, [3, 1, 7])]], monkeypatch)
    other = Row(TOKENS[::-1], 0, [20, 21, 22])
    pieces = [
        [Row(TOKENS[:17], 0, [5, 9], is_sampled=False), other],
        [Row(TOKENS[17:39], 17, [5, 9, 2], is_sampled=False)],
        [Row([4], 40, [20, 21, 22]), Row(TOKENS[39:], 39, [5, 9, 2])],
    ]
    torch.testing.assert_close(last_logits(own, pieces, monkeypatch)[1], whole[0], rtol=1e-4, atol=1e-4)


def test_experts_equal_a_loop_over_them():
    decoder = Decoder(MOE_SHARD, CPU, torch.float32)
    hidden = torch.randn(9, 64)
    scores, chosen = (hidden @ decoder._router[0].T).topk(2, dim=-1)
    expected = torch.zeros_like(hidden)
    for row in range(9):
        for share, expert in zip(scores[row].softmax(-1), chosen[row], strict=True):
            gate, up = (decoder._gate_up[0][expert] @ hidden[row]).chunk(2)
            expected[row] += share * (decoder._down[0][expert] @ (torch.nn.functional.silu(gate) * up))
    torch.testing.assert_close(decoder.moe(0, hidden), expected, rtol=1e-4, atol=1e-4)


def test_only_sampled_rows_give_tokens():
    rows = [Row([5], 3, [1]), Row(TOKENS[:8], 0, [2], is_sampled=False), Row(TOKENS[:4], 0, [3])]
    tokens = executor().run(rows)
    assert len(tokens) == 2
    assert all(0 <= token < 100 for token in tokens)


def test_every_point_becomes_a_call():
    for shard in (DENSE_SHARD, MOE_SHARD):
        own = executor(shard)
        names = set(DENSE) - ({"gate_up_proj", "down_proj"} if shard.num_experts else {"moe"})
        points = [Point(name, num_tokens=5) for name in sorted(names)]
        points += [Point(name, num_seqs=5) for name in SAMPLED]
        points += [
            Point("prefill_attention", chunk_tokens=20, chunk_context_tokens=9),
            Point("decode_attention", contexts=(3, 40)),
            Point("mixed_attention", chunk_tokens=8, contexts=(3, 40)),
            Point("step", num_tokens=10, num_seqs=3, chunk_tokens=8, contexts=(3, 40)),
        ]
        for point in points:
            call = call_of(point, own)
            for i in range(3):
                assert call(i) is not None


def test_a_points_batch_is_what_it_says_and_shares_no_page():
    own = executor()
    point = Point("step", chunk_tokens=20, chunk_context_tokens=9, contexts=(3, 40))
    rows = rows_of(point, own)
    assert [(len(row.token_ids), row.context) for row in rows] == [(1, 3), (1, 40), (20, 9)]
    pages = [page for row in rows for page in row.pages]
    assert len(pages) == len(set(pages)) == pages_needed(point, 16) == 1 + 3 + 2
    assert 0 not in pages


def test_layers_are_left_out_where_memory_is_short(monkeypatch: pytest.MonkeyPatch):
    model = parse_config("tiny", TINY, "test")
    options = {"tensor_parallel": 1, "cache_tokens": 1024, "max_num_seqs": 4, "attention": "auto", "seed": 0}
    assert build_executor(model, CPU, **options).decoder.shard.num_layers == 3
    shard = Shard.of(model, 1)
    layer = 2 * (shard.layer_elements + 1024 * shard.kv_elements)
    monkeypatch.setattr("calibration.executor.free_bytes", lambda _: (2.5 * layer + 2 * shard.other_elements) / 0.9)
    smaller = build_executor(model, CPU, **options)
    assert smaller.decoder.shard.num_layers == 2
    monkeypatch.setattr("calibration.executor.free_bytes", lambda _: 10_000)
    with pytest.raises(ArtifactError, match="one layer of tiny needs"):
        build_executor(model, CPU, **options)


def test_what_has_no_kernels_here_is_refused():
    with pytest.raises(ArtifactError, match="deepseek-v3 has multi-head latent attention"):
        Shard.of(load_model("deepseek-v3"), 1)
    with pytest.raises(ArtifactError, match="opt-13b has an MLP of two matrices"):
        Shard.of(load_model("opt-13b"), 1)
    with pytest.raises(ArtifactError, match="'varlen' cannot run here; importable for cpu: sdpa"):
        attention.choose_backend(CPU, "varlen")


def test_shards_split_what_tensor_parallelism_splits():
    whole, half = (Shard.of(load_model("llama-3.1-8b"), tp) for tp in (1, 2))
    assert (whole.num_heads, whole.num_kv_heads, whole.intermediate_size, whole.vocab_size) == (32, 8, 14336, 128256)
    assert (half.num_heads, half.num_kv_heads, half.intermediate_size, half.vocab_size) == (16, 4, 7168, 64128)
    parameters = whole.num_layers * whole.layer_elements + whole.other_elements
    assert parameters == pytest.approx(load_model("llama-3.1-8b").num_parameters, rel=1e-4)


def test_graphs_are_captured_as_vllm_does():
    assert graph_sizes(1) == [1]
    assert graph_sizes(9) == [1, 2, 4, 8, 16]
    assert graph_sizes(10_000)[-1] == 512


def reference(query, keys, values, starts, totals, pages):
    """Attention by the page, as the paged kernels of all libraries define it."""
    lengths = (starts[1:] - starts[:-1]).tolist()
    rows = [
        Row([0] * n, total - n, row) for n, total, row in zip(lengths, totals.tolist(), pages.tolist(), strict=True)
    ]
    backend = TorchSdpa()
    backend.page_size = keys.shape[1]
    return backend.attend(query, keys, values, Batch(rows, keys.shape[1], CPU))


@pytest.fixture
def fake_libraries(monkeypatch: pytest.MonkeyPatch):
    """The libraries' entry points, by their own keywords, with the reference behind them."""

    def flash_attn_varlen_func(
        *, q, k, v, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, causal, block_table
    ) -> torch.Tensor:
        assert causal
        assert max_seqlen_q == (cu_seqlens_q[1:] - cu_seqlens_q[:-1]).max()
        assert max_seqlen_k >= seqused_k.max()
        return reference(q, k, v, cu_seqlens_q, seqused_k, block_table)

    def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size, enable_gqa, **paged):
        assert cu_seq_k is None
        assert (window_size, enable_gqa) == ((-1, 0), True)
        assert max_k >= paged["seqused_k"].max()
        return reference(query, key, value, cu_seq_q, paged["seqused_k"], paged["block_table"])

    class Wrapper:
        def __init__(self, workspace, layout):
            assert layout == "NHD"

        def plan(self, starts, page_starts, page_ids, last_page_len, heads, kv_heads, head_dim, page_size, **options):
            assert options == {"causal": True, "q_data_type": torch.float32}
            assert (heads, kv_heads, head_dim) == (4, 2, 16)
            counts = page_starts[1:] - page_starts[:-1]
            self.totals = (counts - 1) * page_size + last_page_len
            self.pages = torch.nn.utils.rnn.pad_sequence(page_ids.split(counts.tolist()), batch_first=True)
            self.starts = starts

        def run(self, query, cache):
            return reference(query, *cache, self.starts, self.totals, self.pages)

    modules = {
        "vllm.vllm_flash_attn": {"flash_attn_varlen_func": flash_attn_varlen_func},
        "flashinfer": {"BatchPrefillWithPagedKVCacheWrapper": Wrapper},
        "torch.nn.attention.varlen": {"varlen_attn": varlen_attn},
    }
    for name, members in modules.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))


@pytest.mark.usefixtures("fake_libraries")
@pytest.mark.parametrize("kind", [attention.VllmFlashAttention, attention.FlashInfer, attention.TorchVarlen])
def test_libraries_are_asked_for_the_same_attention(kind: type[attention.Backend]):
    backend = kind()
    cache = KVCache(DENSE_SHARD, 12, backend.page_size, CPU, torch.float32)
    rows = [Row([1], 20, [4, 9]), Row(TOKENS[:5], 12, [2, 7]), Row(TOKENS[:9], 0, [3])]
    batch = Batch(rows, backend.page_size, CPU)
    query = torch.randn(15, 4, 16)
    backend.prepare(batch, 4, 2, 16, torch.float32)
    plain = TorchSdpa()
    plain.page_size = backend.page_size
    expected = plain.attend(query, cache.keys[0], cache.values[0], batch)
    torch.testing.assert_close(backend.attend(query, cache.keys[0], cache.values[0], batch), expected)


def test_summaries_set_outliers_aside_and_bracket_the_median():
    times = [100.0 + i for i in range(21)] + [1000.0, 5000.0]
    assert timing.summarize(times) == (110.0, 105.0, 115.0, 23, 2)
    assert timing.summarize([50.0] * 5) == (50.0, 50.0, 50.0, 5, 0)


def test_calls_take_turns_and_stop_when_the_time_is_known():
    seen = []
    found = timing.Timer(CPU).time(seen.append, limit_s=0.0)
    assert seen == list(range(timing.NUM_WARMUPS + timing.MIN_REPEATS))
    assert found.repeats == timing.MIN_REPEATS
    assert found.ci_low_ns <= found.median_ns <= found.ci_high_ns
    assert (found.clock_mhz, found.throttled) == (None, None)
    assert timing.Timer(CPU).time_exactly(lambda _: None, 9).repeats == 9


def test_clocks_are_read_as_nvidia_smi_says_them():
    assert timing.parse_clocks("1410, 0x0000000000000004") == (1410.0, False)
    assert timing.parse_clocks("705, 0x0000000000000060") == (705.0, True)
    assert timing.parse_clocks("[N/A], [N/A]") == (None, None)
    assert timing.parse_clocks("") == (None, None)
