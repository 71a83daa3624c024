"""Catalog files: round trip, layout, atomic writing, damage; and the comparison of fingerprints."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import stat
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from podgraph.catalog import store
from podgraph.catalog.fingerprint import compare
from podgraph.catalog.format import decode, encode
from podgraph.catalog.model import (
    Catalog,
    Edge,
    Fingerprint,
    KernelNode,
    Record,
    Region,
    Relocation,
    Slot,
    SpecEntry,
    Template,
)
from podgraph.errors import CatalogError, FingerprintMismatch
from podgraph.shapes import AttentionSpec, Bucket

IMAGES = {hashlib.sha256(data).hexdigest(): data for data in (b"\x7fELF pod", b"\x7fELF merge and planner")}
CUDA = Fingerprint("cuda", "9.0", 132, 13000)


@pytest.fixture
def catalog() -> Catalog:
    """Two specifications, two templates, a bucket of each family."""
    pod, merge = IMAGES
    fused = Template(
        nodes=(
            KernelNode(pod, "pod_kernel", (132, 1, 1), (384, 1, 1), 200_000, bytes(24) + b"scalars!"),
            KernelNode(merge, "_merge", (64, 2, 1), (32, 4, 1), 0, bytes(20)),
        ),
        edges=(Edge(0, 1, bytes((1, 0, 1, 0, 0, 0, 0, 255))),),
        relocations=(
            Relocation(0, 0, "q", 0),
            Relocation(0, 8, "partials", 4096),
            Relocation(1, 8, "out", 128),
            Relocation(1, 0, "partials", 0),
        ),
        slots=(Slot("q", 0, 0, 8), Slot("q_stride_n", 0, 24, 4), Slot("flag", 0, 31, 1), Slot("q_stride_n", 1, 16, 4)),
    )
    single = Template((KernelNode(merge, "decode", (8, 1, 1), (128, 1, 1), 512, b""),), (), (), ())
    regions = (Region("q", 0), Region("partials", 4096), Region("out", 0))
    return Catalog(
        fingerprint=CUDA,
        specs={
            "llama3-8b": SpecEntry(AttentionSpec(32, 8, 128, 16), regions, planner=0),
            "größe 2": SpecEntry(
                AttentionSpec(16, 4, 128, 16, sm_scale=0.1), (*regions, Region("meta", 1 << 20)), planner=1
            ),
        },
        max_pages=4096,
        max_kv_len=16_384,
        templates=(fused, single),
        records=(
            Record("llama3-8b", Bucket(33, 512, 32), "pod_sm90", 0, 151.25, 0.001),
            Record("llama3-8b", Bucket(4, 0, 4), "decode", 1, 1e-05),
            Record("größe 2", Bucket(1, 64, 0), "pod_sm90", 0),
        ),
        images=dict(IMAGES),
        built_with={"podgraph": "0.1.0", "nvcc": "13.0"},
    )


@pytest.fixture
def file(catalog: Catalog, tmp_path: Path) -> Path:
    path = tmp_path / "small.podcat"
    store.write(path, catalog)
    return path


def cpu_catalog() -> Catalog:
    return Catalog(
        fingerprint=Fingerprint("cpu"),
        specs={"s": SpecEntry(AttentionSpec(4, 2, 128, 16), ())},
        max_pages=64,
        max_kv_len=1024,
        templates=(),
        records=(Record("s", Bucket(2, 16, 1), "interpreter", -1),),
        images={},
    )


class TestRoundTrip:
    def test_cuda(self, catalog: Catalog, file: Path) -> None:
        assert store.read(file) == catalog
        assert store.read(str(file)) == catalog

    def test_cpu(self, tmp_path: Path) -> None:
        store.write(tmp_path / "a.podcat", cpu_catalog())
        assert store.read(tmp_path / "a.podcat") == cpu_catalog()

    def test_no_records(self, tmp_path: Path) -> None:
        empty = dataclasses.replace(cpu_catalog(), records=())
        store.write(tmp_path / "a.podcat", empty)
        assert store.read(tmp_path / "a.podcat") == empty

    def test_without_file(self, catalog: Catalog) -> None:
        assert decode(*encode(catalog)) == catalog

    @settings(max_examples=100, deadline=None)
    @given(
        edge_data=st.binary(min_size=8, max_size=8),
        params=st.lists(st.binary(max_size=64), min_size=2, max_size=5),
        measured=st.tuples(st.floats(0, 1e300), st.floats(0, 1)),
        name=st.text(st.characters(categories=("L", "N", "P")), min_size=1, max_size=20),
    )
    def test_any_values(self, edge_data: bytes, params: list[bytes], measured: tuple[float, float], name: str) -> None:
        image = next(iter(IMAGES))
        nodes = tuple(KernelNode(image, "f", (1, 1, 1), (1, 1, 1), 0, data) for data in params)
        catalog = Catalog(
            fingerprint=CUDA,
            specs={name: SpecEntry(AttentionSpec(8, 8, 128, 16), (Region(name, 8),), planner=0)},
            max_pages=1,
            max_kv_len=1,
            templates=(Template(nodes, (Edge(0, 1, edge_data),), (), ()),),
            records=(Record(name, Bucket(1, 0, 1), name, 0, *measured),),
            images={image: IMAGES[image]},
        )
        assert decode(*encode(catalog)) == catalog


class TestLayout:
    def test_same_catalog_same_bytes(self, catalog: Catalog, file: Path, tmp_path: Path) -> None:
        reordered = dataclasses.replace(
            catalog,
            specs=dict(reversed(catalog.specs.items())),
            images=dict(reversed(catalog.images.items())),
            built_with=dict(reversed(catalog.built_with.items())),
        )
        other = tmp_path / "other.podcat"
        assert store.write(other, reordered) == file.stat().st_size
        assert other.read_bytes() == file.read_bytes()

    def test_reread_and_written_again(self, file: Path, tmp_path: Path) -> None:
        store.write(tmp_path / "again.podcat", store.read(file))
        assert (tmp_path / "again.podcat").read_bytes() == file.read_bytes()

    def test_container(self, file: Path) -> None:
        with safe_open(file, "numpy") as container:
            metadata = container.metadata()
            tensors = {name: container.get_tensor(name) for name in container.keys()}  # noqa: SIM118 (not a mapping)
        assert {name: (t.dtype.name, t.shape) for name, t in tensors.items()} == {
            **{f"image/{digest}": ("uint8", (len(image),)) for digest, image in IMAGES.items()},
            "params": ("uint8", (52,)),
            "relocations": ("int64", (4, 5)),
            "edges": ("int64", (1, 4)),
            "records": ("int64", (3, 6)),
            "replay_us": ("float64", (3,)),
            "max_error": ("float64", (3,)),
        }
        assert list(metadata) == ["podgraph"]
        document = json.loads(metadata["podgraph"])
        assert list(document) == [
            "built_with",
            "digest",
            "fingerprint",
            "format_version",
            "partition",
            "regions",
            "specs",
            "templates",
            "variants",
            "workspace",
        ]
        assert document["format_version"] == 1
        assert document["variants"] == ["decode", "pod_sm90"]
        assert document["regions"] == ["out", "partials", "q"]
        assert document["templates"][0]["nodes"][1]["params"] == [32, 20]
        assert tensors["relocations"].tolist()[1] == [0, 0, 8, 1, 4096]
        assert tensors["edges"].tolist() == [[0, 0, 1, 0x00010001 - (1 << 56)]]
        assert tensors["records"].tolist()[0] == [1, 33, 512, 32, 0, 1]

    def test_no_gpu_stack_is_imported(self) -> None:
        code = "import sys, podgraph.catalog.store; sys.exit(bool({'torch', 'flashinfer', 'cuda'} & set(sys.modules)))"
        assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False).returncode == 0


class TestWrite:
    @pytest.mark.parametrize("failing", ["os.fsync", "os.replace"])
    def test_failure_leaves_the_old_file(self, failing: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        old = file.read_bytes()

        def fail(*args: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(failing, fail)
        with pytest.raises(CatalogError, match=r"small\.podcat: cannot be written: No space left on device"):
            store.write(file, cpu_catalog())
        assert file.read_bytes() == old
        assert list(file.parent.iterdir()) == [file]

    def test_interrupt_leaves_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupt(*args: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("os.fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            store.write(tmp_path / "a.podcat", cpu_catalog())
        assert not list(tmp_path.iterdir())

    def test_invalid_catalog_leaves_the_old_file(self, catalog: Catalog, file: Path) -> None:
        old = file.read_bytes()
        with pytest.raises(CatalogError, match=r"small\.podcat: cannot be written: workspace\.max_pages: got 0"):
            store.write(file, dataclasses.replace(catalog, max_pages=0))
        assert file.read_bytes() == old

    def test_file_and_folder_are_synced(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[str] = []
        fsync, replace = os.fsync, os.replace

        def spy_fsync(descriptor: int) -> None:
            calls.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
            fsync(descriptor)

        def spy_replace(source: Path, target: Path) -> None:
            calls.append("replace")
            assert source.parent == target.parent
            replace(source, target)

        monkeypatch.setattr("os.fsync", spy_fsync)
        monkeypatch.setattr("os.replace", spy_replace)
        store.write(tmp_path / "a.podcat", cpu_catalog())
        assert calls == ["file", "replace", "folder"]

    @pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
    def test_permissions_of_a_new_file(self, umask: int, mode: int, tmp_path: Path) -> None:
        before = os.umask(umask)
        try:
            store.write(tmp_path / "a.podcat", cpu_catalog())
        finally:
            os.umask(before)
        assert stat.S_IMODE((tmp_path / "a.podcat").stat().st_mode) == mode

    @pytest.mark.parametrize(
        ("target", "message"),
        [
            ("missing/a.podcat", "No such file or directory"),
            ("folder", "Is a directory"),
            ("/", "not a file name"),
        ],
    )
    def test_bad_target(self, target: str, message: str, tmp_path: Path) -> None:
        (tmp_path / "folder").mkdir()
        with pytest.raises(CatalogError, match=f": cannot be written: {message}"):
            store.write(tmp_path / target, cpu_catalog())
        assert [p.name for p in tmp_path.iterdir()] == ["folder"]


class TestRead:
    def test_missing(self, tmp_path: Path) -> None:
        with pytest.raises(CatalogError, match=r"none\.podcat: cannot be read: No such file"):
            store.read(tmp_path / "none.podcat")

    def test_folder(self, tmp_path: Path) -> None:
        with pytest.raises(CatalogError, match="cannot be read: Is a directory"):
            store.read(tmp_path)

    def test_named_pipe(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe.podcat")
        with pytest.raises(CatalogError, match=r"pipe\.podcat: not a regular file"):
            store.read(tmp_path / "pipe.podcat")

    @pytest.mark.parametrize(
        "data",
        [
            b"",
            b"GIF89a",
            bytes(8),
            b"\xff" * 64,
            (1 << 40).to_bytes(8, "little") + b"{}",
            (2).to_bytes(8, "little") + b"{}",
            (2).to_bytes(8, "little") + b"[]",
            (4).to_bytes(8, "little") + b"\xff\xfe{}",
            (1_000_000).to_bytes(8, "little") + b"[" * 1_000_000,
            (1_000_000).to_bytes(8, "little") + b'{"a":' + b"1" * 999_994 + b"}",
        ],
        ids=[
            "empty",
            "short",
            "zeros",
            "ones",
            "long_header",
            "no_metadata",
            "list_header",
            "not_utf8",
            "deep_nesting",
            "huge_integer",
        ],
    )
    def test_not_a_catalog(self, data: bytes, tmp_path: Path) -> None:
        path = tmp_path / "bad.podcat"
        path.write_bytes(data)
        with pytest.raises(CatalogError, match=r"^.*bad\.podcat: "):
            store.read(path)

    @pytest.mark.parametrize(
        "metadata",
        ["{}", '{"podgraph":1}', '{"podgraph":"{}","other":""}', '{"other":"{}"}', '["podgraph"]'],
        ids=["empty", "number", "second_key", "other_key", "list"],
    )
    def test_metadata(self, metadata: str, tmp_path: Path) -> None:
        header = b'{"__metadata__":' + metadata.encode() + b"}"
        path = tmp_path / "bad.podcat"
        path.write_bytes(len(header).to_bytes(8, "little") + header)
        with pytest.raises(CatalogError, match=r"header\.__metadata__|not a safetensors file"):
            store.read(path)

    def test_huge_claims_cost_nothing(self, file: Path) -> None:
        """A header of 64 MiB that is not there; a file of 1 TiB that is mostly a hole."""
        data = bytearray(file.read_bytes())
        data[:8] = (1 << 26).to_bytes(8, "little")
        file.write_bytes(data)
        hole = file.with_name("hole.podcat")
        with open(hole, "wb") as f:
            f.truncate(1 << 40)
        for path, message in ((file, "header length: got 67108864"), (hole, "size: got 1099511627776")):
            tracemalloc.start()
            start = time.perf_counter()
            with pytest.raises(CatalogError, match=message):
                store.read(path)
            seconds = time.perf_counter() - start
            peak_bytes = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert seconds < 0.1
            assert peak_bytes < 1 << 20

    def test_message_stays_printable(self, file: Path) -> None:
        """A name from the file must not clear the terminal."""
        data = file.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = data[8 : 8 + length].replace(b"max_error", b"\\u001b[2J")
        file.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
        with pytest.raises(
            CatalogError, match=r"small\.podcat: tensors: got 'no max_error', allowed: exactly"
        ) as caught:
            store.read(file)
        assert str(caught.value).isprintable()


class TestDamage:
    """No damage is read as a catalog, and none raises anything but CatalogError."""

    def test_cut_at_every_byte(self, file: Path) -> None:
        for size in reversed(range(file.stat().st_size)):
            os.truncate(file, size)
            with pytest.raises(CatalogError, match=r"small\.podcat: "):
                store.read(file)

    def test_extended(self, file: Path) -> None:
        data = file.read_bytes()
        for more in (b"\0", b" ", bytes(4096), data):
            file.write_bytes(data + more)
            with pytest.raises(CatalogError, match="not a safetensors file"):
                store.read(file)

    @pytest.mark.parametrize("mask", [0x01, 0x20, 0x29, 0xFF], ids=hex)
    def test_every_byte_changed(self, mask: int, file: Path) -> None:
        """0x20 changes the case of letters, 0x29 turns a blank into a tab: other spellings of equal JSON."""
        data = file.read_bytes()
        with open(file, "r+b", buffering=0) as f:
            for offset, byte in enumerate(data):
                os.pwrite(f.fileno(), bytes((byte ^ mask,)), offset)
                with pytest.raises(CatalogError):
                    store.read(file)
                os.pwrite(f.fileno(), bytes((byte,)), offset)
        assert file.read_bytes() == data

    @pytest.mark.parametrize(
        "edit",
        [
            lambda data: data.replace(b'":{', b'": {'),
            lambda data: data.replace(b"}}", b"} }", 1),
            lambda data: data.replace(b'{"__metadata__"', b'{"__metadata__":{},"__metadata__"'),
            lambda data: data.replace(b'"dtype":"F64"', b'"dtype":"I64","dtype":"F64"'),
            lambda data: data.replace(b"podgraph", b"\\u0070odgraph", 1),
        ],
        ids=["blank", "last_blank", "second_metadata", "second_dtype", "escape"],
    )
    def test_other_spelling_of_the_header(self, edit: Callable[[bytes], bytes], file: Path) -> None:
        data = file.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = edit(data[8 : 8 + length])
        assert header != data[8 : 8 + length]
        file.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
        with pytest.raises(CatalogError):
            store.read(file)

    @settings(max_examples=300, deadline=None)
    @given(data=st.data())
    def test_random_splices(self, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
        path = tmp_path_factory.getbasetemp() / "spliced.podcat"
        store.write(path, cpu_catalog())
        original = path.read_bytes()
        start = data.draw(st.integers(0, len(original)))
        end = data.draw(st.integers(start, min(len(original), start + 16)))
        damaged = original[:start] + data.draw(st.binary(max_size=16)) + original[end:]
        path.write_bytes(damaged)
        if damaged == original:
            assert store.read(path) == cpu_catalog()
            return
        with pytest.raises(CatalogError):
            store.read(path)


class TestFingerprint:
    def test_equal(self) -> None:
        compare(CUDA, CUDA)

    def test_newer_driver(self) -> None:
        compare(CUDA, dataclasses.replace(CUDA, driver_min=13010))

    def test_cpu_catalog_needs_nothing(self) -> None:
        compare(Fingerprint("cpu"), CUDA)
        compare(Fingerprint("cpu"), Fingerprint("cpu"))

    @pytest.mark.parametrize(
        ("offered", "message"),
        [
            (Fingerprint("cpu"), "backend: the catalog was built for cuda, this machine offers cpu; run on a GPU of "),
            (
                dataclasses.replace(CUDA, compute_capability="9.1"),
                "compute_capability: the catalog was built for 9.0, this machine offers 9.1; rebuild the catalog",
            ),
            (
                dataclasses.replace(CUDA, sm_count=144),
                "sm_count: the catalog was built for 132, this machine offers 144; ",
            ),
            (
                dataclasses.replace(CUDA, driver_min=12080),
                "driver_min: the catalog needs 13000 (CUDA 13.0) or newer, this machine offers 12080 (CUDA 12.8); "
                "update the driver or rebuild the catalog on this GPU",
            ),
        ],
        ids=["backend", "compute_capability", "sm_count", "driver_min"],
    )
    def test_mismatch(self, offered: Fingerprint, message: str) -> None:
        with pytest.raises(FingerprintMismatch) as caught:
            compare(CUDA, offered)
        assert str(caught.value).startswith(message)

    def test_every_difference_is_named(self) -> None:
        with pytest.raises(FingerprintMismatch, match=r"compute_capability: .*; sm_count: .*; driver_min: .*; rebuild"):
            compare(CUDA, Fingerprint("cuda", "8.0", 108, 12000))
