"""Sarathi-Serve's measured batches, priced from others of the same GPU.

Fitted on what is checked: nothing. Figure 2 prices figure 9 and table 2.
"""

import pytest
from typer.testing import CliRunner

from calibration.batches import check_batches
from calibration.cli import app
from sim.errors import ArtifactError

BATCHES = "data/profiles/sarathi_measured_batches"


def test_chunks_and_mixed_batches_from_whole_prompts_and_decodes(shared):
    errors = {batch.name: abs(batch.error) for batch in check_batches(shared / BATCHES)}
    assert len(errors) == 19
    # the same four decodes took 49 ms in one of their tables and 68 ms in another
    assert errors.pop("0 tokens of a prompt and 4 decodes") == pytest.approx(0.283, abs=0.001)
    assert errors.pop("1021 tokens of a prompt and 3 decodes") < 0.015
    assert sum(errors.values()) / len(errors) < 0.04
    assert max(errors.values()) < 0.13


def test_what_is_printed(shared):
    done = CliRunner().invoke(app, ["batches", str(shared / BATCHES)])
    assert done.stdout.splitlines()[1].split()[-3:] == ["ms", "-0.93", "%"]


def test_files_that_are_none_are_refused(tmp_path):
    (tmp_path / "fig2_prefill.csv").write_text(
        "Batch Id,batch_num_prefill_tokens,batch_execution_time\n1,128,0.1\n2,256,0.2\n"
    )
    (tmp_path / "fig2_decode.csv").write_text(
        "Batch Id,batch_num_decode_tokens,batch_execution_time\n1,1,0.1\n2,2,0.2\n"
    )
    with pytest.raises(ArtifactError, match="figure 2 has 2 prompts and 2 batches of decodes"):
        check_batches(tmp_path)
