import pytest

from sim.errors import ScenarioError
from sim.gpu import Gpu, gpus, load_gpu


def test_a_gpu_is_its_row_in_bytes_and_flops():
    assert load_gpu("rtx-3090") == Gpu(
        name="rtx-3090",
        memory_bytes=round(23.69 * 2**30),
        bandwidth_bytes_per_s=0.936e12,
        bf16_flops=71e12,
        fp8_flops=None,
        link_bytes_per_s=32e9,
        host_link_bytes_per_s=32e9,
        source="NVIDIA GA102 white paper, dense tensor peak with fp32 accumulate; PCIe 4.0 x16, no NVLink bridge",
    )


def test_the_table_holds_dense_peaks():
    peaks = {gpu.name: (gpu.bf16_flops / 1e12, gpu.fp8_flops and gpu.fp8_flops / 1e12) for gpu in gpus()}
    assert peaks["h100-sxm"] == (989, 1979)
    assert peaks["l40s"] == (362, 733)
    assert peaks["mi300x"] == (1307, 2615)
    assert peaks["a100-sxm-80gb"] == (312, None)


def test_every_row_is_plausible_and_has_a_source():
    assert len({gpu.name for gpu in gpus()}) == len(gpus()) == 17
    for gpu in gpus():
        assert 20 * 2**30 < gpu.memory_bytes < 300 * 2**30
        assert 50 < gpu.bf16_flops / gpu.bandwidth_bytes_per_s < 500
        assert 32e9 <= gpu.link_bytes_per_s < gpu.bandwidth_bytes_per_s
        assert gpu.source


def test_an_unknown_gpu_is_an_error_that_lists_the_known_ones():
    with pytest.raises(ScenarioError) as error:
        load_gpu("H100-SMX")
    assert str(error.value) == (
        "hardware.gpu: unknown GPU 'H100-SMX'; known: a10g, a30, a100-sxm-80gb, a100-sxm-40gb, a100-pcie-80gb, l4, "
        "l40s, h100-sxm, h100-pcie, h200-sxm, b200, gb200, b300, mi300x, rtx-3090, rtx-4090, rtx-pro-6000. "
        "Did you mean 'h100-sxm'?"
    )
