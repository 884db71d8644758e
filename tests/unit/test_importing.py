"""`servesim calibrate import` over every kind of measurement: what it writes, and what it says of bad files."""

import gzip
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from calibration.cli import app
from calibration.importers.aiconfigurator import import_tables
from calibration.importing import IMPORTERS
from sim.cost.artifact import read_artifact
from sim.cost.table import Table
from sim.errors import UserError
from sim.step import StepShape
from tests.unit import published

FILES = {
    "llmservingsim": ["tp1_dense.csv", "tp1_per_sequence.csv", "tp1_attention.csv"],
    "aiconfigurator": [
        "h100_sxm_vllm0.24.0_gemm.csv",
        "h100_sxm_vllm0.24.0_context_attention_hd128.csv",
        "h100_sxm_vllm0.24.0_generation_attention_hd128.csv",
    ],
    "vidur": ["a100_mlp.csv", "a100_attention.csv", "net.csv", "cpu.csv"],
    "splitwise": ["perf_model.csv"],
    "vtc": ["cost_profile.json"],
    "distserve": ["coefficients.json"],
}
TIMES = re.compile(r"time_us|latency|prompt_time|token_time|\.median|_median")
EVERY_FILE = [(kind, file) for kind, files in FILES.items() for file in files]
CSV_FILES = [(kind, file) for kind, file in EVERY_FILE if file.endswith(".csv")]


def imported(kind, folder, *options):
    """The artifact that the command writes of sound files, or what it refuses them with."""
    arguments = getattr(published, kind)(folder)
    return run(kind, folder, [*arguments, *options])


def run(kind, folder, arguments):
    out = folder.parent / "artifact.json"
    done = CliRunner().invoke(app, ["import", kind, *arguments, "--out", str(out)])
    if done.exception is not None:
        raise done.exception
    return read_artifact(out)


def refusal(kind, folder, damage, file):
    """What a sound folder with one damaged file is refused with."""
    arguments = getattr(published, kind)(folder)
    damage(folder / file)
    with pytest.raises(UserError) as caught:
        run(kind, folder, arguments)
    return str(caught.value)


def test_every_importer_has_its_files_here():
    assert FILES.keys() == IMPORTERS.keys()


@pytest.mark.parametrize("kind", FILES)
def test_sound_files_become_an_artifact_that_prices(kind, tmp_path):
    artifact = imported(kind, tmp_path / "p")
    ms = Table(artifact).price(StepShape(8, 8 * 200, 8 * 200**2, 200, ((100, 0),), 9)) / 1e6
    assert 5 < ms < 200
    assert "\ufffd" not in artifact.source
    shown = CliRunner().invoke(app, ["show", str(tmp_path / "artifact.json")]).stdout
    assert all(term.name in shown for term in artifact.terms)


def empty(path):
    path.write_text("")


def folder_instead(path):
    path.unlink()
    path.mkdir()


def gone(path):
    path.unlink()


def noise(path):
    path.write_bytes(bytes(range(256)))


def cut(path):
    """JSON ends in the middle, CSV in the middle of its header."""
    path.write_text(path.read_text()[:12])


@pytest.mark.parametrize("damage", [empty, folder_instead, gone, noise, cut])
@pytest.mark.parametrize(("kind", "file"), EVERY_FILE)
def test_files_that_are_none_are_named(kind, file, damage, tmp_path):
    message = refusal(kind, tmp_path / "p", damage, file)
    assert file.removesuffix(".csv").removeprefix("h100_sxm_vllm0.24.0_") in message


@pytest.mark.parametrize("kind", ["llmservingsim", "aiconfigurator"])
def test_a_damaged_gz_is_named(kind, tmp_path):
    def squeeze(path):
        whole = gzip.compress(path.read_bytes())
        path.with_name(path.name + ".gz").write_bytes(whole[: len(whole) // 2])
        path.unlink()

    file = FILES[kind][0]
    assert re.search(rf"{file}\.gz: cannot be read as CSV", refusal(kind, tmp_path / "p", squeeze, file))


def times_of(path):
    table = pd.read_csv(path)
    return table, [name for name in table.columns if TIMES.search(name)]


def with_time(value):
    """The first time of the first row is this."""

    def damage(path):
        table, columns = times_of(path)
        table[columns[0]] = table[columns[0]].astype(object)
        table.loc[0, columns[0]] = value
        table.to_csv(path, index=False)

    return damage


@pytest.mark.parametrize("value", ["nan", 0, -1, "fast", "inf", 1e30])
@pytest.mark.parametrize(("kind", "file"), CSV_FILES)
def test_times_that_are_none_are_named_with_their_line(kind, file, value, tmp_path):
    message = refusal(kind, tmp_path / "p", with_time(value), file)
    assert re.search(rf"{file}:2: \S+ is ", message)


@pytest.mark.parametrize(
    ("kind", "file", "column", "value"),
    [
        ("aiconfigurator", "h100_sxm_vllm0.24.0_context_attention_hd128.csv", "isl", 0),
        ("aiconfigurator", "h100_sxm_vllm0.24.0_gemm.csv", "m", 0),
        ("vidur", "a100_attention.csv", "kv_cache_size", 1e-300),
    ],
)
def test_sizes_that_are_none_are_named_with_their_line(kind, file, column, value, tmp_path):
    def damage(path):
        table = pd.read_csv(path)
        table[column] = table[column].astype(float)
        table.loc[1, column] = value
        table.to_csv(path, index=False)

    message = refusal(kind, tmp_path / "p", damage, file)
    assert re.search(rf"{file}:3: {column} is \S+; expected a number", message)


@pytest.mark.parametrize(("kind", "file"), CSV_FILES)
def test_missing_columns_are_named_beside_those_that_are_there(kind, file, tmp_path):
    def misspell(path):
        table, columns = times_of(path)
        table.rename(columns={columns[0]: "timme"}).to_csv(path, index=False)

    assert re.search(rf"{file}: no column \S+; it has .*timme", refusal(kind, tmp_path / "p", misspell, file))


@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize(("kind", "file"), CSV_FILES)
def test_grids_of_one_point_or_none_are_refused(kind, file, rows, tmp_path):
    def shorten(path):
        pd.read_csv(path).head(rows).to_csv(path, index=False)

    message = refusal(kind, tmp_path / "p", shorten, file)
    wrongs = ("has no rows", "only", "fewer than two", "less than two", "nothing was", "no all-reduce", "5 or more")
    assert any(wrong in message for wrong in wrongs), message


@pytest.mark.parametrize("factor", [1e-6, 1e-3, 1e3, 1e6])
@pytest.mark.parametrize(
    ("kind", "file"), [own for own in CSV_FILES if own[1] not in ("net.csv", "cpu.csv", "tp1_per_sequence.csv")]
)
def test_times_in_another_unit_are_noticed(kind, file, factor, tmp_path):
    def convert(path):
        table, columns = times_of(path)
        table[columns] = table[columns] * factor
        table.to_csv(path, index=False)

    message = refusal(kind, tmp_path / "p", convert, file)
    assert "Is a column in another unit (ms, us, ns)? Convert it." in message


JUNK = [
    "",
    "0",
    "-1",
    "nan",
    "inf",
    "1e400",
    "1e-300",
    "abc",
    '"',
    "\n",
    ",",
    "[]",
    "{}",
    "null",
    "true",
    "\x00",
    "é",
    "1e11",
]


@pytest.mark.parametrize("kind", FILES)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_whatever_a_cell_holds_it_is_imported_or_refused(kind, data):
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "p"
        arguments = getattr(published, kind)(folder)
        path = folder / data.draw(st.sampled_from(sorted(file.name for file in folder.iterdir())))
        lines = path.read_text().splitlines()
        i = data.draw(st.integers(0, len(lines) - 1))
        cells = lines[i].split(",")
        cells[data.draw(st.integers(0, len(cells) - 1))] = data.draw(st.sampled_from(JUNK))
        lines[i] = ",".join(cells)
        path.write_text("\n".join(lines))
        try:
            Table(run(kind, folder, arguments))
        except UserError as error:
            event(error.found.partition(" ")[0])


def vtc(**entries):
    def change(content):
        content["8"].update(entries)

    return change


def vtc_cut(content):
    del content["8"], content["512"], content["128"]["64"]


def vtc_in_ms(content):
    for outputs in content.values():
        outputs.update({output: [n, 1e3 * prefill, 1e3 * decode] for output, (n, prefill, decode) in outputs.items()})


def distserve(**entries):
    def change(content):
        content["distserve"]["1"].update(entries)

    return change


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("cost_profile.json", vtc(a=[3, 1.0, 1.0]), r"is no cost profile \(invalid literal .*'a'"),
        ("cost_profile.json", vtc(**{"64": [3, 0.0, 1.0]}), r"8\.64: is \[3, 0\.0, 1\.0\]; expected .* above zero"),
        ("cost_profile.json", vtc(**{"64": [3, 1.0, float("nan")]}), r"8\.64: is \[3, 1\.0, nan\]"),
        ("cost_profile.json", vtc(**{"64": [3, 1.0]}), r"is no cost profile \(not enough values"),
        ("cost_profile.json", vtc_cut, r"3 different iterations timed; 5 or more"),
        ("cost_profile.json", vtc_in_ms, r"in another unit"),
        ("coefficients.json", distserve(prefill=[1.0, 2.0]), r"distserve\.1\.prefill\.2: Field required"),
        ("coefficients.json", distserve(prefill=[-1.0, 2.0, 1.0]), r"prefill\.0: Input should be greater"),
        ("coefficients.json", distserve(prefil=[1.0, 2.0, 1.0]), r"prefil: Extra inputs"),
        ("coefficients.json", distserve(prefill=[1.8e4, 100.0, 7e-3]), r"in another unit"),
        ("coefficients.json", distserve(decoding_smallbs=[2e4, 0.6, 40.0]), r"in another unit"),
        (
            "coefficients.json",
            lambda content: content.update(vllm=content.pop("distserve")),
            r"--engine: .*; it has vllm",
        ),
    ],
)
def test_json_that_is_no_profile_is_refused(file, change, message, tmp_path):
    def damage(path):
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    kind = "vtc" if file == "cost_profile.json" else "distserve"
    assert re.search(message, refusal(kind, tmp_path / "p", damage, file))


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("splitwize", [], r"KIND: unknown importer 'splitwize'; known: .*Did you mean 'splitwise'\?"),
        ("vtc", ["--tp", "2"], r"--tp: means nothing to vtc; it takes --model"),
        ("splitwise", ["--host-us", "3"], r"--host-us: means nothing to splitwise; it takes --tp, --model, --gpu"),
        ("splitwise", ["--gpu", "h100"], r"no times of llama-2-70b on 8 x h100; timed: \[\('llama2-70b'"),
        ("splitwise", ["--model", "mixtral-8x7b"], r"--model: mixtral-8x7b is a mixture of experts; these tables"),
        ("vtc", ["--model", "qwen3-32b-fp8"], r"--model: qwen3-32b-fp8 is a model with quantized weights"),
        ("distserve", ["--model", "opt-13"], r"--model: unknown model 'opt-13'.*Did you mean 'opt-13b'\?"),
        ("distserve", ["--tp", "3"], r"--tp: .* none of distserve on 3 GPUs; it has 1"),
        ("llmservingsim", ["--tp", "2"], r"there is no .*tp2_dense\.csv"),
        ("llmservingsim", ["--link-latency-us", "2"], r"--link-latency-us: is given without the rate of the link"),
        ("llmservingsim", ["--model", "mistral-7b-v0.1"], r"--model: mistral-7b-v0\.1 is a model with sliding windows"),
        ("vidur", ["--host-us", "3"], r"--host-from: is given beside --host-us"),
        ("aiconfigurator", ["--gpu", "h200_sxm"], r"there is no h200_sxm_vllm\*_gemm\.csv"),
        ("aiconfigurator", ["--tp", "8"], r"no context attention of 4 heads and 1 KV heads; timed: \[\(32, 8\)\]"),
    ],
)
def test_options_that_do_not_fit_are_refused(kind, options, message, tmp_path):
    writer = kind if kind in FILES else "splitwise"
    arguments = getattr(published, writer)(tmp_path / "p")
    with pytest.raises(UserError, match=message):
        run(kind, tmp_path / "p", [*arguments, *options])


def test_what_is_missing_on_the_command_line_is_named(tmp_path):
    folder = tmp_path / "p"
    arguments = published.vidur(folder)
    with pytest.raises(UserError, match="PATHS: 1 given; vidur takes 2 to 3"):
        run("vidur", folder, arguments[:1])
    with pytest.raises(UserError, match="--model: is missing; expected a bundled name or a config"):
        run("vidur", folder, arguments[:3])
    with pytest.raises(UserError, match=r"PATHS: none given, and aiconfigurator-core is not installed"):
        run("aiconfigurator", folder, ["--model", "llama-3.1-8b"])
    with pytest.raises(UserError, match=r"--out: cannot write '.*nowhere/a\.json' \(No such file"):
        CliRunner().invoke(
            app, ["import", "vidur", *arguments, "--out", str(tmp_path / "nowhere/a.json")], catch_exceptions=False
        )


def of_another_format(path):
    path.write_text(json.dumps({"sha256": "0", "format": 2}))


def of_times_that_are_none(path):
    path.write_text(re.sub(r'"us":\[[0-9.]+', '"us":[NaN', path.read_text()))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (empty, r"not JSON"),
        (noise, r"not JSON"),
        (cut, r"not JSON"),
        (gone, r"cannot read .*No such file"),
        (folder_instead, r"cannot read .*Is a directory"),
        (of_another_format, r"format: Input should be 1"),
        (of_times_that_are_none, r"terms\.0\.us\.0: Input should be a finite number"),
    ],
)
def test_artifacts_that_are_none_are_not_shown(damage, message, tmp_path):
    imported("splitwise", tmp_path / "p")
    damage(tmp_path / "artifact.json")
    with pytest.raises(UserError, match=rf"^ARTIFACT: .*{message}"):
        CliRunner().invoke(app, ["show", str(tmp_path / "artifact.json")], catch_exceptions=False)


@pytest.mark.parametrize("arguments", [["import", "splitwise", "none.csv", "--out", "a.json"], ["show", "."]])
def test_what_is_refused_ends_with_2_and_one_message(arguments):
    done = subprocess.run([sys.executable, "-m", "sim", "calibrate", *arguments], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"(\S.*\n)+", done.stderr)
    assert "Traceback" not in done.stderr


def test_the_installed_package_gives_what_its_tables_give_as_csv(tmp_path, monkeypatch):
    published.aiconfigurator_package(tmp_path / "site")
    published.aiconfigurator(tmp_path / "csv")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    package = import_tables(None, "llama-3.1-8b")
    folder = import_tables(tmp_path / "csv", "llama-3.1-8b")
    assert package.source == "AIConfigurator, aiconfigurator-core 9.8.7 on PyPI, systems/data"
    assert package.model_copy(update={"source": folder.source}) == folder
    assert "aiconfigurator_core" not in sys.modules
    with pytest.raises(UserError, match=r"no gemm of vLLM on 'h100_smx'; it has h100_sxm\. Did you mean 'h100_sxm'\?"):
        import_tables(None, "llama-3.1-8b", "h100_smx")
    shutil.rmtree(tmp_path / "site/aiconfigurator_core/systems/data")
    with pytest.raises(UserError, match=r"there is no h100_sxm_vllm\*_gemm\.csv"):
        import_tables(None, "llama-3.1-8b")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "mem_bw:",
            "mem_bandwidth:",
            r"does not state the memory bandwidth and its corrections \(KeyError\('mem_bw'\)\)",
        ),
        ("3.35e+12", "0", r"states a memory bandwidth of 0 B/us, .*; expected a bandwidth above zero"),
        ("gpu:", "gpu", r"cannot be read as YAML|does not state"),
    ],
)
def test_a_data_sheet_that_is_none_is_refused(old, new, message, tmp_path):
    def damage(path):
        path.write_text(path.read_text().replace(old, new))

    assert re.search(message, refusal("aiconfigurator", tmp_path / "p", damage, "h100_sxm_system.yaml"))


def test_vidurs_four_families_are_named_terms(tmp_path):
    artifact = imported("vidur", tmp_path / "p")
    calls = {term.name: term.calls for term in artifact.terms}
    assert calls["mlp_up_proj"] == calls["decode_attention"] == 32
    assert calls["allreduce"] == 64
    assert [term.name for term in artifact.terms if term.is_communication] == ["allreduce"]
    assert (artifact.host_us, artifact.host_us_per_request) == (pytest.approx(300), pytest.approx(44))
    assert artifact.cuda_graph_sizes[:5] == [1, 2, 4, 8, 16]
    assert artifact.missing == ["LM head", "sampling", "gaps between kernels"]
    # 4.26 ms of host for 90 requests; all-reduce of one row: 8 KiB between the first two sizes
    table = Table(artifact)
    assert table.price(StepShape(5, 500, 50_000, 100, (), 5)) > Table(artifact, 0).price(
        StepShape(5, 500, 50_000, 100, (), 5)
    )
    assert table.host_ns(StepShape(90, 90, 90, 1, (), 90)) == pytest.approx(4_260_000, abs=1)
    alone = artifact.model_copy(update={"terms": [term for term in artifact.terms if not term.is_communication]})
    one = StepShape(1, 100, 10_000, 100, (), 1)
    assert table.price(one) - Table(alone).price(one) == pytest.approx(64 * (10 + 8192e-5) * 1e3, rel=1e-4)
