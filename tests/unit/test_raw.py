from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from calibration import raw
from sim.errors import ArtifactError

METADATA = raw.Metadata(
    hardware=raw.Hardware(name="Test GPU", memory_bytes=2**34),
    device="cuda",
    driver="1.2",
    versions={"torch": "2.13.0", "python": "3.11"},
    backends={"decode_attention": "torch gather + SDPA"},
    dtype="bfloat16",
    model="tiny",
    config={"hidden_size": 64},
    tensor_parallel=1,
    num_layers=2,
    date="2026-01-01",
    seed=0,
)


def point(operator: str, **values: float) -> dict[str, object]:
    times = {"median_ns": 1e3, "ci_low_ns": 9e2, "ci_high_ns": 1.1e3, "repeats": 5, "outliers": 0}
    return {"operator": operator, "mode": "eager"} | times | values


def test_points_come_back_in_order_whichever_call_added_them(tmp_path: Path) -> None:
    path = tmp_path / "raw.parquet"
    raw.append(path, [point("norm", num_tokens=4), point("norm", num_tokens=8, clock_mhz=1410.0)], METADATA)
    raw.append(path, [point("decode_attention", num_decodes=2, decode_context_tokens=30)], METADATA)
    points, metadata = raw.read(path)
    assert metadata == METADATA
    assert list(points.columns) == list(raw.COLUMNS)
    assert points["operator"].tolist() == ["norm", "norm", "decode_attention"]
    assert points["num_tokens"].tolist() == [4, 8, 0]
    assert points["clock_mhz"].isna().tolist() == [True, False, True]
    assert [path.name for path in tmp_path.iterdir()] == ["raw.parquet"]


def test_a_write_that_fails_leaves_the_points_that_were_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "raw.parquet"
    raw.append(path, [point("norm")], METADATA)

    def interrupt(table: pa.Table, where: Path, **_: object) -> None:
        where.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(pq, "write_table", interrupt)
    with pytest.raises(KeyboardInterrupt):
        raw.append(path, [point("rotary")], METADATA)
    assert raw.read(path).points["operator"].tolist() == ["norm"]
    assert [path.name for path in tmp_path.iterdir()] == ["raw.parquet"]


def test_points_of_something_else_are_refused_and_another_date_is_not(tmp_path: Path) -> None:
    path = tmp_path / "raw.parquet"
    raw.append(path, [point("norm")], METADATA)
    raw.append(path, [point("norm")], METADATA.model_copy(update={"date": "2026-01-02"}))
    assert raw.read(path).metadata == METADATA
    with pytest.raises(ArtifactError, match='holds points of model "tiny", and these are of "small"'):
        raw.append(path, [point("norm")], METADATA.model_copy(update={"model": "small"}))


def test_what_is_no_raw_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "raw.parquet"
    with pytest.raises(ArtifactError, match="cannot read"):
        raw.read(path)
    path.write_bytes(b"PAR1 of nothing")
    with pytest.raises(ArtifactError, match="no raw file of a profile"):
        raw.read(path)
    pq.write_table(pa.table({"operator": ["norm"]}), path)
    with pytest.raises(ArtifactError, match="no raw file of a profile"):
        raw.read(path)
    schema = {b"servesim": METADATA.model_dump_json().encode()}
    pq.write_table(pa.table({"operator": ["norm"]}).replace_schema_metadata(schema), path)
    with pytest.raises(ArtifactError, match="no column mode, num_tokens"):
        raw.read(path)
    schema = {b"servesim": METADATA.model_dump_json().replace('"seed":0', '"seed":-1').encode()}
    pq.write_table(pa.table({"operator": ["norm"]}).replace_schema_metadata(schema), path)
    with pytest.raises(ArtifactError, match=r"metadata seed: .* greater than or equal to 0"):
        raw.read(path)
