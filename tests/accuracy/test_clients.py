"""S-LoRA's runs under VTC's queues, each from the profile of the same server.

Fitted on what is checked: nothing. The profile timed the model alone, so the server with its router is slower than
its replay.
"""

import pytest
from typer.testing import CliRunner

from calibration.cli import app
from calibration.clients import check_clients
from sim.errors import ArtifactError

PROFILE = "data/profiles/vtc_slora_a10g/cost_profile.json"


@pytest.mark.parametrize("name", ["VTC_overload", "FCFS_overload"])
def test_overload_lasts_nearly_as_long_and_each_client_waits_its_part(shared, name):
    everybody, *clients = check_clients(shared / PROFILE, shared / f"data/groundtruth/vtc_slora/{name}.csv")
    assert -0.08 < everybody.errors[2] < 0
    assert all(abs(error) < 0.13 for client in clients for error in client.errors)
    (calm, _), (greedy, _) = (client.first_token_s for client in clients)
    assert (greedy > 2 * calm) is (name == "VTC_overload")


@pytest.mark.slow
def test_a_client_within_its_share_is_served_at_once(shared):
    found = check_clients(shared / PROFILE, shared / "data/groundtruth/vtc_slora/VTC_proportional.csv")
    served, queued = found[1:3], found[3]
    assert all(abs(client.errors[1]) < 0.03 for client in served)
    assert queued.errors[1] == pytest.approx(-0.33, abs=0.02)


def test_what_is_printed(shared):
    runs = str(shared / "data/groundtruth/vtc_slora/VTC_increase.csv")
    done = CliRunner().invoke(app, ["clients", runs, "--profile", str(shared / PROFILE)])
    assert done.stdout.splitlines()[1].split()[:4] == ["VTC_increase", "all", "10.1", "2.6"]
    assert len(done.stdout.splitlines()) == 4


def test_files_that_are_none_are_refused(shared, tmp_path):
    (tmp_path / "run.csv").write_text("client\n1\n")
    with pytest.raises(ArtifactError, match="does not say the order of its queue"):
        check_clients(shared / PROFILE, tmp_path / "run.csv")
    (tmp_path / "FCFS_run.csv").write_text("client\n1\n")
    with pytest.raises(ArtifactError, match="no column req_time_s"):
        check_clients(shared / PROFILE, tmp_path / "FCFS_run.csv")
