"""`servesim conformance` as a user runs it."""

import os
import re
import subprocess
import sys

import pytest

from tests.conformance import tiny
from tests.conftest import ROOT


def conformance(folder, *arguments):
    """Exit code, standard output (times blanked, no trailing spaces) and standard error of a run in `folder`."""
    run = subprocess.run(
        [sys.executable, "-m", "sim", "conformance", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "80"},
        capture_output=True,
        text=True,
    )
    output = re.sub(r"\d+\.\d\d(?=  )", "0.00", run.stdout)
    return run.returncode, "\n".join(line.rstrip() for line in output.splitlines()), run.stderr


def test_logs_that_agree(tmp_path):
    tiny.write(tmp_path, *tiny.golden())
    tiny.write(tmp_path, *tiny.golden(), name="again")
    assert conformance(tmp_path, "again.json", "tiny.log.jsonl.gz") == (
        0,
        "scenario  engine                     steps  seconds  result\n"
        "again     vllm 0.33.0                    7     0.00  passed\n"
        "tiny      vllm 0.33.0                    7     0.00  passed\n"
        "2 passed, 0 failed",
        "",
    )


EXPECTED_OF_A_FOLDER = """\
scenario  engine                     steps  seconds  result
foreign   sglang 0.33.0                  7     0.00  skipped (no policy for engine 'sglang')
key       vllm 0.33.0                    7     0.00  error
tiny      vllm 0.33.0                    7     0.00  FAILED

tiny: step 4 differs in scheduled, num_cached_tokens, free_blocks
state before it (end of step 3):
   scheduled [["a",1]]
   running ["a"]
   waiting ["b","d"]
   free_blocks 1
   field              log                   replay
   step               4                     4
>  scheduled          [(1 equal), ["b",2]]  [(1 equal)]
   new                []                    []
   resumed            []                    []
   preempted          []                    []
   finished           []                    []
   cancelled          ["d"]                 ["d"]
>  num_cached_tokens  {b: 4}                {}
   running            ["a"]                 ["a"]
   waiting            ["b"]                 ["b"]
>  free_blocks        7                     1
Not counted: 1 skipped for lack of a policy, 1 could not be replayed
0 passed, 1 failed"""


def test_a_folder_with_everything_in_it(tmp_path):
    scenario, lines = tiny.golden()
    tiny.write(tmp_path, scenario | {"engine": "sglang"}, lines, name="foreign")
    tiny.write(tmp_path, scenario | {"config": {"num_gpu_blocs": 4}}, lines, name="key")
    lines[5] |= {"free_blocks": 7, "scheduled": [["a", 1], ["b", 2]], "num_cached_tokens": {"b": 4}}
    tiny.write(tmp_path, scenario, lines)
    code, output, complaints = conformance(tmp_path, ".")
    assert (code, output) == (1, EXPECTED_OF_A_FOLDER)
    assert re.fullmatch(r"error: key.json: config: unknown key 'num_gpu_blocs'; .* 'num_gpu_blocks'\?\n", complaints)


def test_a_bad_file_among_good_ones(tmp_path):
    tiny.write(tmp_path, *tiny.golden())
    (tmp_path / "other.log.jsonl.gz").write_bytes(b"")
    code, output, complaints = conformance(tmp_path, ".")
    assert (code, output.splitlines()[-1]) == (2, "1 passed, 0 failed")
    assert complaints == "error: other.json: no such file.\n"


def test_nothing_that_can_be_replayed(tmp_path):
    scenario, lines = tiny.golden()
    tiny.write(tmp_path, scenario | {"engine": "sglang"}, lines)
    code, output, complaints = conformance(tmp_path, "tiny.json")
    assert (code, output.splitlines()[-1], complaints) == (2, "0 passed, 0 failed", "")


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("nowhere", "error: nowhere: no such file or folder. Name an input, its log, or a folder of them.\n"),
        (".", "error: .: holds no log (<name>.log.jsonl.gz beside <name>.json).\n"),
    ],
)
def test_paths_that_name_nothing(tmp_path, argument, expected):
    assert conformance(tmp_path, argument) == (2, "", expected)


def test_long_lists_show_where_they_differ(tmp_path):
    scenario, lines = tiny.golden()
    lines[2]["waiting"] = [f"r{i}" for i in range(20)]
    tiny.write(tmp_path, scenario, lines)
    code, output, _ = conformance(tmp_path, "tiny.json")
    assert (code, "tiny: step 1 differs in waiting" in output) == (1, True)
    shown = " ".join(re.findall(r'"r\d+"|\(\d+ more\)', output))
    assert shown == " ".join([*(f'"r{i}"' for i in range(8)), "(12 more)"])
