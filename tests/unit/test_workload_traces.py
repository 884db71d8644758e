import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sim.errors import ScenarioError, TraceError
from sim.tokens import UNIQUE, Run
from sim.workload.azure import AzureOptions, AzureTrace
from sim.workload.base import TRACES, TraceRows, no_shared_tokens
from sim.workload.csv_trace import CsvOptions, CsvTrace
from sim.workload.files import resolve_path
from sim.workload.mooncake import MooncakeOptions, MooncakeTrace
from sim.workload.replay import play

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def columns(rows: TraceRows) -> list[list[int]]:
    return [rows.arrival_ns.tolist(), rows.prompt_tokens.tolist(), rows.output_tokens.tolist()]


def azure(path) -> TraceRows:
    return AzureTrace.build(AzureOptions(kind="azure", path=str(path))).read()


def mooncake(path, **options) -> TraceRows:
    return MooncakeTrace.build(MooncakeOptions(kind="mooncake", path=str(path), **options)).read()


def csv(path, **options) -> TraceRows:
    names = {"prompt_column": "in", "output_column": "out", **options}
    return CsvTrace.build(CsvOptions(kind="csv", path=str(path), **names)).read()


@pytest.fixture
def file(tmp_path):
    """Writes a file; gives its path."""

    def write(content: str | bytes):
        path = tmp_path / "trace"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def message(read, path, **options) -> str:
    """The error's text with the file's path as FILE."""
    with pytest.raises(TraceError) as caught:
        read(path, **options)
    return str(caught.value).replace(str(path), "FILE")


# --- Azure ----------------------------------------------------------------------------------------


def test_azure_rows(file):
    path = file(f"{HEADER}\r\n2023-11-16 23:59:59.9805900,374,44\r\n2023-11-17 00:00:00.0805901,396,109")
    assert columns(azure(path)) == [[0, 100_000_100], [374, 396], [44, 109]]
    assert azure(path).tokens is no_shared_tokens


def test_azure_rows_are_sorted_by_time_and_equal_times_keep_their_order(file):
    path = file(f"{HEADER}\n2024-05-10 00:00:02,1,1\n2024-05-10 00:00:01,2,2\n2024-05-10 00:00:02,3,3\n")
    assert columns(azure(path)) == [[0, 10**9, 10**9], [2, 1, 3], [2, 1, 3]]
    two_times = "".join(f"2024-05-10 00:00:0{i % 2},{i + 1},1\n" for i in range(200))
    assert azure(file(f"{HEADER}\n{two_times}")).prompt_tokens.tolist() == [*range(1, 201, 2), *range(2, 201, 2)]


def test_azure_stamps_of_2024_carry_a_zone(file):
    rows = "2024-05-10 00:00:00.009930+00:00,1,1\n2024-05-10T02:00:01+02:00,2,2\n"
    assert columns(azure(file(f"{HEADER}\n{rows}")))[0] == [0, 990_070_000]


def test_the_real_azure_traces(shared):
    folder = shared / "data/traces/azure_llm_2023"
    conversation, code = azure(folder / "conv_first30min.csv"), azure(folder / "code_first30min.csv")
    assert (len(conversation), int(conversation.prompt_tokens.max())) == (10108, 14050)
    assert (len(code), int(code.prompt_tokens.max()), int(code.output_tokens.max())) == (5740, 7437, 1899)
    assert conversation.arrival_ns[-1] == 1_799_899_351_000


NUMBER = "expected a whole number from 1 to 1000000000000. Correct the row or delete it."
STAMP = "expected a time like 2023-11-16 18:15:46.6805900. Correct the row or delete it."


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "FILE: the file is empty; a header line and one line per request are needed."),
        (HEADER, "FILE: the trace has no requests; at least one is needed."),
        (
            "TIME,ContextTokens,GeneratedTokens\n",
            f"FILE:1: the header is 'TIME,ContextTokens,GeneratedTokens'; an Azure trace begins with {HEADER!r}. "
            "Other columns are read by kind: csv.",
        ),
        (f"{HEADER}\n2023-01-01 00:00:00,1,1\n\n2023-01-01 00:00:00,-5,1", f"FILE:4: ContextTokens is '-5'; {NUMBER}"),
        (f"{HEADER}\n2023-01-01 00:00:00,0,1", f"FILE:2: ContextTokens is '0'; {NUMBER}"),
        (f"{HEADER}\n2023-01-01 00:00:00,1,NaN", f"FILE:2: GeneratedTokens is 'NaN'; {NUMBER}"),
        (f"{HEADER}\n2023-01-01 00:00:00,1,", f"FILE:2: GeneratedTokens is ''; {NUMBER}"),
        (f"{HEADER}\n2023-01-01 00:00:00,1,1e3", f"FILE:2: GeneratedTokens is '1e3'; {NUMBER}"),
        (f"{HEADER}\n2023-01-01 00:00:00,1,٣", f"FILE:2: GeneratedTokens is '٣'; {NUMBER}"),
        (f"{HEADER}\nyesterday,1,1", f"FILE:2: TIMESTAMP is 'yesterday'; {STAMP}"),
        (f"{HEADER}\n2023-02-30 00:00:00,1,1", f"FILE:2: TIMESTAMP is '2023-02-30 00:00:00'; {STAMP}"),
        (f"{HEADER}\n2023-01-01 24:00:00,1,1", f"FILE:2: TIMESTAMP is '2023-01-01 24:00:00'; {STAMP}"),
        (
            f"{HEADER}\n2023-01-01 00:00:00,1",
            "FILE:2: the row has 2 columns; the header has 3 (TIMESTAMP, ContextTokens, GeneratedTokens). "
            "Correct the row or delete it.",
        ),
        (
            f"{HEADER}\n".encode() + b"2023,\xff",
            "FILE:2: the byte 0xff is not UTF-8. Is this a text file? If it is, save it as UTF-8.",
        ),
        (f'{HEADER}\n"2023', "FILE:2: this is not CSV (unexpected end of data)."),
    ],
)
def test_bad_azure_files(file, content, expected):
    assert message(azure, file(content)) == expected


def test_files_that_cannot_be_opened(tmp_path, monkeypatch):
    monkeypatch.delenv("SERVESIM_SHARED", raising=False)
    remedy = "Correct the path (a relative one starts at the scenario's folder)"
    assert message(azure, tmp_path / "no.csv") == f"FILE: no such file. {remedy} or set SERVESIM_SHARED."
    monkeypatch.setenv("SERVESIM_SHARED", "x")
    assert message(azure, tmp_path / "no.csv") == f"FILE: no such file. {remedy}."
    assert message(azure, tmp_path) == "FILE: this is a folder; a file is needed."
    assert message(azure, tmp_path / ("x" * 300)) == "FILE: cannot be read ([Errno 36] File name too long: 'FILE')."


# --- Mooncake -------------------------------------------------------------------------------------


def line(**changes) -> str:
    return json.dumps({"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [7, 8], **changes})


def test_mooncake_rows_and_the_streams_of_their_blocks(file):
    path = file("\n".join([line(), line(timestamp=27.5, input_length=1024, hash_ids=[7, 9]), line(hash_ids=None)]))
    rows = mooncake(path)
    assert columns(rows) == [[0, 0, 27_500_000], [600, 600, 1024], [5, 5, 5]]
    name = str(path)
    assert rows.tokens(0).prefix == (Run((name, 7), 512), Run((name, 8), 88))
    assert rows.tokens(1) is UNIQUE
    assert rows.tokens(2).prefix == (Run((name, 7), 512), Run((name, 9), 512))


def test_mooncake_blocks_of_another_size(file):
    rows = mooncake(file(line(input_length=17)), hash_block_tokens=16)
    assert [run.length for run in rows.tokens(0).prefix] == [16, 1]


def test_the_real_mooncake_trace(shared):
    rows = mooncake(shared / "data/traces/mooncake_fast25/conversation_first15min.jsonl")
    assert len(rows) == 2728
    assert all(rows.tokens(i).shared_tokens == rows.prompt_tokens[i] for i in range(0, 2728, 50))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("\n", "FILE: the trace has no requests; at least one is needed."),
        (
            "{",
            "FILE:1: this is not JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1)).",
        ),
        (
            "[" * 100_000,
            "FILE:1: this is not JSON "
            "(maximum recursion depth exceeded while decoding a JSON array from a unicode string).",
        ),
        ("[1]", "FILE:1: the line is [1]; expected a JSON object. Correct the row or delete it."),
        (line() + "\n" + line(input_length=0), f"FILE:2: input_length is 0; {NUMBER}"),
        (line(output_length=True), f"FILE:1: output_length is True; {NUMBER}"),
        (line(output_length=1.5), f"FILE:1: output_length is 1.5; {NUMBER}"),
        ('{"timestamp": 0}', f"FILE:1: input_length is None; {NUMBER}"),
        (
            line(timestamp=-1),
            "FILE:1: timestamp is -1; expected milliseconds, zero or more. Correct the row or delete it.",
        ),
        (
            line(timestamp=float("nan")),
            "FILE:1: timestamp is nan; expected milliseconds, zero or more. Correct the row or delete it.",
        ),
        (
            line(hash_ids=[1]),
            "FILE:1: 1 hash_ids for an input_length of 600; expected 2, one for each 512 tokens begun. "
            "Correct the row, or set hash_block_tokens.",
        ),
        (
            line(hash_ids=["a", 2]),
            "FILE:1: hash_ids is ['a', 2]; expected 64-bit whole numbers. Correct the row or delete it.",
        ),
        (
            line(hash_ids=[1, 2**63]),
            "FILE:1: hash_ids is [1, 9223372036854775808]; expected 64-bit whole numbers. "
            "Correct the row or delete it.",
        ),
    ],
)
def test_bad_mooncake_files(file, content, expected):
    assert message(mooncake, file(content)) == expected


# --- any CSV --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("unit", "expected"), [("s", 1_500_000_000), ("ms", 1_500_000), ("us", 1500), ("ns", 2)], ids=str
)
def test_csv_units(file, unit, expected):
    path = file("id,at,in,out\na,10,3,4\nb,11.5,5,6\n")
    assert columns(csv(path, arrival_column="at", arrival_unit=unit)) == [[0, expected], [3, 5], [4, 6]]


def test_csv_seconds_since_1970_keep_their_nanoseconds(file):
    path = file("at,in,out\n1700000000.000000001,3,4\n1.700000000000000003e9,5,6\n")
    assert columns(csv(path, arrival_column="at"))[0] == [0, 2]


def test_csv_without_arrivals_comes_all_at_once(file):
    assert columns(csv(file("\ufeffin,out\n3,4\n5,6\n"))) == [[0, 0], [3, 5], [4, 6]]


@pytest.mark.parametrize("cell", ["-1", "nan", "inf", "", "x", "1_0", "1e30", "1e999999999", "sNaN"])
def test_csv_bad_times(file, cell):
    path = file(f"at,in,out\n{cell},3,4\n")
    assert message(csv, path, arrival_column="at") == (
        f"FILE:2: at is {cell!r}; expected a time in s, zero or more. Correct the row or delete it."
    )


def test_csv_columns_that_are_not_there(file):
    path = file("prompt,out,out\n3,4,5\n")
    assert message(csv, path) == "FILE:1: there is no column 'in'; columns: prompt, out, out."
    assert message(csv, path, prompt_column="promt") == (
        "FILE:1: there is no column 'promt'; columns: prompt, out, out. Did you mean 'prompt'?"
    )
    assert message(csv, path, prompt_column="prompt") == (
        "FILE:1: two columns are called 'out'; columns: prompt, out, out."
    )


# --- all of them ----------------------------------------------------------------------------------

PIECES = st.lists(
    st.sampled_from(
        [
            *(HEADER, "2023-11-16 18:15:46.1", "in,out", ",", "\n", "\r\n", '"'),
            *(line(), line(hash_ids=None), "{", "}", "[", "null", '"hash_ids": [1, 2]'),
            *("0", "-1", "12", "1e9", "NaN", "\x00", "²", "\u2028"),
        ]
    ),
    max_size=12,
).map(lambda pieces: "".join(pieces).encode())


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=60) | PIECES)
@pytest.mark.parametrize("read", [azure, mooncake, csv])
def test_whatever_the_file_holds_it_gives_requests_or_a_trace_error(file, read, content):
    path = file(content)
    try:
        rows = read(path)
    except TraceError as error:
        place, rows = error.place, None
    if rows is None:
        assert place.startswith(str(path))
    else:
        assert len(rows) > 0
        assert min(rows.prompt_tokens) > 0
        assert rows.arrival_ns[0] == 0


# --- knobs and paths ------------------------------------------------------------------------------

TEN = TraceRows(np.arange(10) * 10**9, np.arange(1, 11), np.arange(11, 21), lambda row: (row,))


def played(**knobs) -> TraceRows:
    return play(TEN, AzureOptions(kind="azure", path="trace.csv", **knobs), np.random.default_rng(1))


def test_knobs_in_their_order():
    assert columns(played()) == columns(TEN)
    rows = played(start_s=2.5, duration_s=5, limit=3, rate_scale=2)
    assert columns(rows) == [[250_000_000, 750_000_000, 1_250_000_000], [4, 5, 6], [14, 15, 16]]
    assert [rows.tokens(row) for row in range(3)] == [(3,), (4,), (5,)]


def test_the_window_holds_its_beginning_and_not_its_end():
    assert played(start_s=2, duration_s=3).prompt_tokens.tolist() == [3, 4, 5]


def test_thinning_keeps_a_share():
    many = TraceRows(np.arange(10_000), np.arange(10_000), np.arange(10_000))
    options = AzureOptions(kind="azure", path="trace.csv", thin=0.3)
    kept = play(many, options, np.random.default_rng(1))
    assert abs(len(kept) - 3000) < 3 * np.sqrt(2100)
    assert kept.arrival_ns.tolist() == kept.prompt_tokens.tolist()


def test_knobs_that_leave_nothing():
    with pytest.raises(TraceError) as caught:
        played(start_s=9.5)
    assert str(caught.value) == (
        "trace.csv: no request lies between start_s 9.5 and the end of the window; the trace lasts 9 s."
    )
    with pytest.raises(TraceError) as caught:
        played(thin=1e-9)
    assert str(caught.value) == "trace.csv: thin 1e-09 keeps none of the requests. Raise it, or widen the window."


@pytest.mark.parametrize("rate_scale", [1e-12, 1e-300])
def test_a_trace_cannot_be_stretched_without_end(rate_scale):
    with pytest.raises(TraceError) as caught:
        played(rate_scale=rate_scale)
    assert str(caught.value) == (
        f"trace.csv: rate_scale {rate_scale:g} stretches it beyond what a run can last; at most 4e+09 s."
    )


def test_paths_are_resolved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WHERE", "traces")
    assert resolve_path("${WHERE}/a.csv", tmp_path / "s") == tmp_path / "s/traces/a.csv"
    assert resolve_path("/abs/a.csv", tmp_path / "s").as_posix() == "/abs/a.csv"
    monkeypatch.delenv("SERVESIM_SHARED", raising=False)
    assert resolve_path("${SERVESIM_SHARED}/a.csv", tmp_path / "s") == tmp_path.parent / "shared/a.csv"
    monkeypatch.setenv("SERVESIM_SHARED", "here")
    assert resolve_path("${SERVESIM_SHARED}/a.csv", tmp_path / "s") == tmp_path / "here/a.csv"
    with pytest.raises(ScenarioError) as caught:
        resolve_path("${NOWHERE}/a.csv", tmp_path, place="traffic[0].trace.path")
    assert str(caught.value) == (
        "traffic[0].trace.path: the environment variable 'NOWHERE' in '${NOWHERE}/a.csv' is not set. "
        "Set it, or write the path out."
    )


def test_every_format_is_registered():
    assert {TRACES.load(kind) for kind in TRACES} == {AzureTrace, MooncakeTrace, CsvTrace}
