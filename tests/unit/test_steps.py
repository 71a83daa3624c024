"""Step histograms: sums, step logs, files, and merging with what they say about their origin."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgraph.errors import TraceError
from podgraph.workload import provenance
from podgraph.workload.bad_rows import BadRows
from podgraph.workload.provenance import Part, Provenance
from podgraph.workload.step_files import METADATA_KEY, merge_files, read_provenance, write_steps
from podgraph.workload.steps import COLUMNS, StepHistogram, merge, summed
from podgraph.workload.traces import read_log, read_steps

Row = tuple[int, int, int, int, int, int, int]


def histogram(rows: list[Row], source: str = "test") -> StepHistogram:
    columns = np.array(rows, dtype=np.int64).reshape(-1, len(COLUMNS)).T.copy()
    return summed(dict(zip(COLUMNS, columns, strict=True)), source)


def rows_of(h: StepHistogram) -> list[Row]:
    return list(zip(*(getattr(h, name).tolist() for name in COLUMNS), strict=True))


MIXED: list[Row] = [(0, 0, 4, 3, 120, 0, 0), (7, 1, 0, 1, 0, 7, 28), (12, 2, 4, 2, 90, 24, 150)]

_row = st.tuples(
    *(st.integers(1, 3), st.just(1), st.integers(0, 2), st.integers(1, 50)), *(st.integers(0, 10**6) for _ in range(3))
)
_histogram = st.lists(_row, min_size=1, max_size=12).map(histogram)


def test_summed_sorts_and_adds() -> None:
    twice = histogram([*reversed(MIXED), *MIXED])
    assert rows_of(twice) == [(a, b, c, *(2 * n for n in sums)) for a, b, c, *sums in MIXED]
    assert (len(twice), twice.total) == (3, 12)
    assert len(histogram([])) == 0


@given(a=_histogram, b=_histogram, c=_histogram)
def test_merge_is_a_sum(a: StepHistogram, b: StepHistogram, c: StepHistogram) -> None:
    left = merge([merge([a, b], "x"), c], "x")
    assert rows_of(left) == rows_of(merge([a, merge([c, b], "x")], "x")) == rows_of(merge([c, b, a], "x"))
    assert left.total == a.total + b.total + c.total
    for name in COLUMNS[3:]:
        assert getattr(left, name).sum() == sum(getattr(h, name).sum() for h in (a, b, c))


@given(h=_histogram)
def test_any_histogram_survives_a_file(tmp_path_factory: pytest.TempPathFactory, h: StepHistogram) -> None:
    for name in ("any.parquet", "any.csv"):
        path = tmp_path_factory.getbasetemp() / name
        write_steps(h, path)
        assert rows_of(read_steps(path)) == rows_of(h)


def test_a_sum_that_int64_cannot_hold() -> None:
    with pytest.raises(TraceError, match=r"prefill_pairs: the sum must be below 2\*\*62"):
        histogram([(2, 1, 0, 1, 0, 2, 2**61)] * 2)


def test_a_histogram_checks_its_order() -> None:
    good = histogram(MIXED)
    with pytest.raises(TraceError, match="must ascend, each once"):
        replace(good, prefill_len=good.prefill_len[::-1].copy())
    with pytest.raises(TraceError, match="must ascend, each once"):
        replace(good, **{name: np.ones(3, dtype=np.int64) for name in COLUMNS[:3]})
    with pytest.raises(TraceError, match="steps: must"):
        replace(good, steps=np.zeros(3, dtype=np.int64))


def write(directory: Path, data: bytes | str, name: str = "steps") -> Path:
    path = directory / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


LOG = "decode_count,note,prefill_len,prefill_requests\n4,a,0,0\n0,b,7,1\n4,c,0,0\n"


def as_jsonl(text: str) -> str:
    head, *rows = (line.split(",") for line in text.splitlines())
    return "".join(json.dumps(dict(zip(head, row, strict=True))) + "\n" for row in rows)


def as_parquet(text: str) -> bytes:
    buffer = io.BytesIO()
    pl.read_csv(text.encode()).write_parquet(buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "form",
    [str.encode, as_jsonl, as_parquet, lambda text: gzip.compress(text.encode())],
    ids=["csv", "jsonl", "parquet", "gzip"],
)
def test_a_log_that_an_engine_wrote(tmp_path: Path, form: Callable[[str], Any]) -> None:
    path = write(tmp_path, form(LOG))
    assert rows_of(read_steps(path)) == [(0, 0, 4, 2, 0, 0, 0), (7, 1, 0, 1, 0, 0, 0)]
    log = read_log(path)
    assert isinstance(log, StepHistogram)
    assert log.source == str(path)


def test_a_log_with_weights(tmp_path: Path) -> None:
    text = "prefill_len,prefill_requests,decode_count,steps,decode_kv_tokens\n" + "0,0,4,1000,5\n" * 300 + "8,2,0,1,0\n"
    assert rows_of(read_steps(write(tmp_path, text))) == [(0, 0, 4, 300_000, 1500, 0, 0), (8, 2, 0, 1, 0, 0, 0)]


def test_optional_columns_in_some_rows_of_jsonl(tmp_path: Path) -> None:
    row = '{"prefill_len": 0, "prefill_requests": 0, "decode_count": 1}\n'
    heavy = '{"prefill_len": 0, "prefill_requests": 0, "decode_count": 1, "steps": 10}\n'
    assert read_steps(write(tmp_path, row * 200)).total == 200
    assert read_steps(write(tmp_path, row * 200 + heavy)).total == 210


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("0,0,0,1", "got a step of nothing"),
        ("5,0,1,1", "prefill_requests: must be in 1..prefill_len=5"),
        ("1,2,0,1", "prefill_requests: must be in 1..prefill_len=1"),
        ("-1,0,1,1", "prefill_len: must be a whole number"),
        ("0,0,1,0", "steps: must be a whole number in 1.."),
        ("0,0,1,", "steps: must be a whole number in 1.."),
        ("0,0,1.5,1", "decode_count: must be a whole number"),
        (f"0,0,{2**31},1", "decode_count: must be a whole number in 0..2147483647"),
    ],
)
@pytest.mark.parametrize("good_rows", [1, 200])
def test_bad_rows_of_step_logs(tmp_path: Path, row: str, reason: str, good_rows: int) -> None:
    text = "prefill_len,prefill_requests,decode_count,steps\n" + "0,0,4,1\n" * good_rows + row + "\n"
    bad = BadRows()
    assert read_steps(write(tmp_path, text), bad).total == good_rows
    assert bad.count == 1
    assert reason in bad.shown[0]
    assert f"line {good_rows + 2}: " in bad.shown[0]


@pytest.mark.parametrize("row", [(0, 0, 0), (5, 0, 1), (1, 2, 0), (-1, 0, 1)])
def test_bad_rows_of_parquet_step_logs(tmp_path: Path, row: tuple[int, int, int]) -> None:
    frame = pl.DataFrame([(0, 0, 4), row], schema=["prefill_len", "prefill_requests", "decode_count"], orient="row")
    frame.write_parquet(tmp_path / "steps")
    bad = BadRows()
    assert read_steps(tmp_path / "steps", bad).total == 1
    assert f"{tmp_path}/steps: row 2: prefill_" in bad.shown[0]


def test_files_that_are_no_step_log(tmp_path: Path) -> None:
    requests = write(tmp_path, "num_prefill_tokens,num_decode_tokens\n5,5\n", "requests")
    with pytest.raises(TraceError, match=r"requests: a request log \(POD\), not a step log"):
        read_steps(requests)
    with pytest.raises(TraceError, match="no good row in 0 read"):
        read_steps(write(tmp_path, LOG.splitlines()[0] + "\n"))


def part(shard: int = 1, shards: int = 2, trace: str = "aa", rate: float | None = 2.5) -> Part:
    return Part(trace, shard, shards, "a.csv", rate, 3, 100, 99, 1, 7, 5_000_000)


SETTINGS: provenance.Settings = {"token_budget": 512, "chunk": None, "load": 0.85, "step_cost": "h200"}


def saved(path: Path, *parts: Part, **changed: provenance.Setting) -> Path:
    write_steps(histogram(MIXED), path, Provenance(SETTINGS | changed, parts))
    return path


def test_provenance_is_kept_in_parquet(tmp_path: Path) -> None:
    origin = Provenance(SETTINGS, (part(),))
    write_steps(histogram(MIXED), tmp_path / "a.parquet", origin)
    assert read_provenance(tmp_path / "a.parquet") == origin
    write_steps(histogram(MIXED), tmp_path / "a.csv", origin)
    assert read_provenance(tmp_path / "a.csv") is None


def test_shards_merge_whatever_their_order(tmp_path: Path) -> None:
    one, two = saved(tmp_path / "1.parquet", part(1)), saved(tmp_path / "2.parquet", part(2))
    other = saved(tmp_path / "3.parquet", part(trace="bb", shards=1, rate=9.0))
    added, origin = merge_files([one, two, other], tmp_path / "a.parquet")
    merge_files([merge_to(tmp_path / "b.parquet", other, two), one], tmp_path / "c.parquet")
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "c.parquet").read_bytes()
    assert added.total == 3 * histogram(MIXED).total
    assert origin is not None
    assert origin.total("finished") == 297


def merge_to(output: Path, *files: Path) -> Path:
    merge_files(files, output)
    return output


def test_merging_what_says_nothing(tmp_path: Path) -> None:
    one = saved(tmp_path / "1.parquet", part())
    write_steps(histogram(MIXED), tmp_path / "2.csv")
    assert merge_files([one, tmp_path / "2.csv"], tmp_path / "a.parquet")[1] is None
    assert read_provenance(tmp_path / "a.parquet") is None


@pytest.mark.parametrize(
    ("parts", "changed", "said"),
    [
        ((part(),), {}, r"2\.parquet: shard 1/2 of a\.csv is in \S+1\.parquet already"),
        ((part(2, 3),), {}, r"cuts a\.csv into 3 shards, \S+1\.parquet into 2"),
        ((part(2, rate=3.5),), {}, r"a\.csv at 3\.5 requests/s, in \S+1\.parquet at 2\.5"),
        ((part(2),), {"token_budget": 2048}, r"token_budget 512 against 2048"),
        ((part(2),), {"chunk": 64, "load": None}, r"chunk None against 64, load 0\.85 against None"),
    ],
)
def test_what_was_not_simulated_alike(
    tmp_path: Path, parts: tuple[Part, ...], changed: dict[str, Any], said: str
) -> None:
    files = [saved(tmp_path / "1.parquet", part()), saved(tmp_path / "2.parquet", *parts, **changed)]
    with pytest.raises(TraceError, match=said):
        merge_files(files, tmp_path / "a.parquet")
    assert not (tmp_path / "a.parquet").exists()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format": 2}',
        '{"format": 1, "settings": [], "parts": []}',
        '{"format": 1, "settings": {}, "parts": [{}]}',
        '{"format": 1, "settings": {"a": [1]}, "parts": []}',
        '{"format": 1, "settings": {}, "parts": 5}',
        "[" * 100_000,
    ],
)
def test_damaged_provenance(tmp_path: Path, text: str) -> None:
    frame = pl.DataFrame({name: [1] for name in COLUMNS})
    frame.write_parquet(tmp_path / "a.parquet", metadata={METADATA_KEY: text})
    with pytest.raises(TraceError, match=r"a\.parquet: .*; simulate it again") as caught:
        read_provenance(tmp_path / "a.parquet")
    assert len(str(caught.value)) < 600


def test_a_damaged_file_has_no_provenance(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="not readable as Parquet"):
        read_provenance(write(tmp_path, b"PAR1" + b"x" * 100))
    with pytest.raises(TraceError, match="cannot be read: No such file"):
        read_provenance(tmp_path / "nowhere")


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "old")
    monkeypatch.setattr("os.replace", lambda *names: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(TraceError, match="cannot be written: No space left"):
        write_steps(histogram(MIXED), path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    monkeypatch.undo()
    with pytest.raises(TraceError, match="cannot be written: No such file"):
        write_steps(histogram(MIXED), tmp_path / "nowhere" / "a.parquet")
