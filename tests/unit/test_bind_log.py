"""What a bind logs, and that it is left to the application where that goes."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from podgraph.catalog.model import Catalog, Fingerprint, Record, Region, SpecEntry
from podgraph.dispatch.runtime import OpenCatalog
from podgraph.errors import CatalogError
from podgraph.planner import Layout, Policy
from podgraph.shapes import AttentionSpec, Bucket

SPEC = AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=64, page_size=16)
BUCKETS = (Bucket(4, 16, 2), Bucket(4, 0, 4))


def opened() -> OpenCatalog:
    layout = Layout.of(SPEC, BUCKETS, Policy.for_sms(0))
    sizes = dict.fromkeys(("q", "k", "v", "out", "lse", "kv_indices"), 0) | layout.sizes
    entry = SpecEntry(SPEC, tuple(Region(*item) for item in sorted(sizes.items())), layout.capacity)
    records = tuple(Record("tiny", bucket, "interpreter", -1) for bucket in BUCKETS)
    return OpenCatalog(
        Path("memory.podcat"), Catalog(Fingerprint("cpu"), {"tiny": entry}, 64, 800, (), records, {}, {})
    )


def test_a_bind_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    catalog = opened()
    with caplog.at_level(logging.DEBUG):
        with catalog.bind(padding_cap=0.5) as dispatcher:
            dispatcher.plan([0, 1], [0, 1], [0], [16])
            dispatcher.plan([0, 5], [0, 1], [0], [16])
        (line,) = caplog.record_tuples
        assert line[:2] == ("podgraph", logging.INFO)
        assert line[2].startswith(
            "bound memory.podcat: spec tiny, device cpu, 2 buckets, 0 templates, settings interpreter, "
            "on_miss=split, padding_cap=0.5, "
        )
        assert ", bytes regions 0, " in line[2]
        with pytest.raises(CatalogError):
            catalog.bind("other")
        assert len(caplog.records) == 1


def test_nothing_is_made_up_for_a_level_that_nobody_reads(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("podgraph.dispatch.dispatcher.Dispatcher.memory", lambda _: pytest.fail("asked for memory"))
    with caplog.at_level(logging.WARNING, "podgraph"):
        opened().bind().close()
    assert caplog.records == []


def test_the_library_installs_no_handler() -> None:
    code = (
        "import logging, podgraph.dispatch.runtime\n"
        "own = logging.getLogger('podgraph')\n"
        "print(own.handlers, logging.getLogger().handlers, own.level, own.propagate)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert done.stdout == "[] [] 0 True\n"
