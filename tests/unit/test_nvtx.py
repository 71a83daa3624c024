"""Ranges around plan and run, told to a domain that remembers them in the place of a profiler."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nvtx
import pytest
import torch

from podgraph.catalog.model import Catalog, Fingerprint, Record, Region, SpecEntry
from podgraph.dispatch.dispatcher import Dispatcher
from podgraph.dispatch.nvtx import TracedDispatcher, message_of
from podgraph.dispatch.runtime import OpenCatalog
from podgraph.errors import BatchError, PodgraphError
from podgraph.planner import Layout, Policy
from podgraph.shapes import AttentionSpec, Bucket

SPEC = AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=64, page_size=16)
BUCKET = Bucket(4, 16, 2)
RUN = f"run {BUCKET}"


class Domain:
    """What nvtx's domains do, as a list of what began and ended."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.made: list[str] = []

    def get_event_attributes(self, message: str) -> str:
        self.made.append(message)
        return message

    def push_range(self, attributes: str) -> None:
        self.events.append(attributes)

    def pop_range(self) -> None:
        self.events.append("end")


def opened() -> OpenCatalog:
    layout = Layout.of(SPEC, (BUCKET,), Policy.for_sms(0))
    sizes = dict.fromkeys(("q", "k", "v", "out", "lse", "kv_indices"), 0) | layout.sizes
    entry = SpecEntry(SPEC, tuple(Region(*item) for item in sorted(sizes.items())), layout.capacity)
    records = (Record("tiny", BUCKET, "interpreter", -1),)
    catalog = Catalog(Fingerprint("cpu"), {"tiny": entry}, 64, 800, (), records, {}, {})
    return OpenCatalog(Path("memory.podcat"), catalog)


def traced() -> TracedDispatcher:
    dispatcher = opened().bind(nvtx=True)
    assert isinstance(dispatcher, TracedDispatcher)
    return dispatcher


@pytest.fixture
def domain(monkeypatch: pytest.MonkeyPatch) -> Domain:
    made = Domain()
    monkeypatch.setattr(nvtx, "get_domain", {"podgraph": made}.__getitem__)
    return made


CACHE = torch.zeros(4, 2, 16, 2, 64).bfloat16()


def run(dispatcher: TracedDispatcher, rows: int) -> None:
    out = dispatcher.run(torch.zeros(rows, 4, 64).bfloat16(), CACHE)
    assert out.shape == (rows, 4, 64)


def test_every_call_is_a_range_that_names_its_bucket(domain: Domain) -> None:
    with traced() as dispatcher:
        records = dispatcher.plan([0, 5, 6], [0, 1, 2], [0, 1], [16, 16])
        assert [record.bucket for record in records] == [BUCKET]
        run(dispatcher, 6)
        run(dispatcher, 6)
        dispatcher.plan([0, 20], [0, 2], [0, 1], [16])  # cut in two
        run(dispatcher, 20)
        dispatcher.plan([0], [0], [], [])
        run(dispatcher, 1)
        assert domain.events == [
            *("plan", "end", RUN, "end", RUN, "end"),
            *("plan", "end", "run in 2 parts", "end"),
            *("plan", "end", "run", "end"),
        ]
        assert dispatcher.counters.runs == 4
        assert dispatcher.counters.replays == {str(BUCKET): 4}


def test_a_plan_into_a_bucket_of_choice_is_a_plan(domain: Domain) -> None:
    from podgraph.batch import Batch

    with traced() as dispatcher:
        batch = Batch.of([0, 1], [0, 1], [0], [3], page_size=16, max_kv_len=800)
        dispatcher.plan_into(dispatcher.plan([0, 1], [0, 1], [0], [3])[0], batch)
        run(dispatcher, 1)
    assert domain.events == ["plan", "end", "plan", "end", RUN, "end"]


def test_a_range_ends_where_a_call_fails(domain: Domain) -> None:
    with traced() as dispatcher:
        with pytest.raises(PodgraphError, match="nothing is planned"):
            run(dispatcher, 1)
        dispatcher.plan([0, 1], [0, 1], [0], [16])
        with pytest.raises(BatchError):
            dispatcher.plan([0, 1], [0, 1], [0], [17])
        run(dispatcher, 1)  # the plan before is in force
    assert domain.events == ["run", "end", "plan", "end", "plan", "end", RUN, "end"]


def test_off_is_another_class(domain: Domain) -> None:
    dispatcher = opened().bind()
    assert type(dispatcher) is Dispatcher
    dispatcher.plan([0, 1], [0, 1], [0], [16])
    assert domain.events == []


def test_messages_are_made_once(domain: Domain) -> None:
    with traced() as dispatcher:
        for _ in range(3):
            dispatcher.plan([0, 1], [0, 1], [0], [16])
            run(dispatcher, 1)
    assert domain.made == ["plan", "run", RUN]


def test_the_real_library_works_without_a_profiler_and_without_a_gpu() -> None:
    with traced() as dispatcher:
        dispatcher.plan([0, 1], [0, 1], [0], [16])
        run(dispatcher, 1)
        assert dispatcher.counters.runs == 1


def test_what_a_run_is_called() -> None:
    record = Record("tiny", BUCKET, "interpreter", -1)
    assert [message_of([record] * n) for n in (0, 1, 2, 3)] == ["run", RUN, "run in 2 parts", "run in 3 parts"]


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("import podgraph.dispatch.runtime\nprint('nvtx' in sys.modules)", "False"),
        (
            "sys.modules['nvtx'] = None\ntry: import podgraph.dispatch.nvtx\nexcept Exception as e: print(repr(e))",
            "ConfigError(\"nvtx=True: nvtx is not installed; pip install 'podgraph[nvtx]'\")",
        ),
    ],
    ids=["not loaded when off", "not installed"],
)
def test_in_a_fresh_process(code: str, printed: str) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", f"import sys\n{code}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout == printed + "\n"
