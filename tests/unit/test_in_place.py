"""Metadata of which a part lies on the host: what of it is read, and what is refused before anything is planned."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from test_dispatcher import BUCKETS, MAX_PAGES, SPEC, catalog_of

from podgraph.batch import Batch
from podgraph.dispatch.gpu import GpuBackend
from podgraph.dispatch.in_place import InPlace
from podgraph.dispatch.select import Selector
from podgraph.errors import BatchError

RECORDS = catalog_of().buckets("tiny")


@pytest.fixture
def in_place() -> InPlace:
    return InPlace(SPEC, torch.device("cpu"), Selector(RECORDS, SPEC, MAX_PAGES), strict=False)


def test_page_numbers_behind_the_last_request_are_left_out(in_place: InPlace) -> None:
    arrays, addresses = in_place.check([[0, 1], [0, 2], [3], np.arange(5 * MAX_PAGES)])
    assert addresses == (0, 0, 0, 0)
    assert arrays[3].tolist() == [0, 1]


def test_more_page_numbers_than_there_is_room_for_are_refused(in_place: InPlace) -> None:
    pages = MAX_PAGES + 1
    with pytest.raises(BatchError, match=rf"kv_indices: got {pages} .*, allowed: at most workspace.max_pages = 64"):
        in_place.check([[0, 1], [0, pages], [3], np.arange(pages)])


@pytest.mark.parametrize("requests", [0, 1, BUCKETS[0].batch, BUCKETS[0].batch + 1, 1000])
def test_a_named_bucket_has_a_slot_for_each_request(in_place: InPlace, requests: int) -> None:
    qo = np.arange(requests + 1, dtype=np.int32)
    arrays: list[Any] = [qo, qo, qo[1:], qo[1:]]
    if requests <= BUCKETS[0].batch:
        assert in_place.choose(arrays, (0, 0, 0, 0), None, None, RECORDS[0])[1] == requests
        return
    with pytest.raises(BatchError, match=f"got {requests} requests, allowed: at most the 4 of bucket"):
        in_place.choose(arrays, (0, 0, 0, 0), None, None, RECORDS[0])


def test_a_part_of_a_batch_says_where_its_rows_begin() -> None:
    """The planner holds qo_indptr[0] against it."""
    launched: list[int] = []

    class Staging:
        def upload(self, *arguments: Any) -> tuple[int, int, int, int]:
            return 1, 2, 3, 4

    class Planner:
        def launch(self, *arguments: Any, first_row: int = 0) -> None:
            launched.append(first_row)

    backend: Any = GpuBackend.__new__(GpuBackend)
    backend.stream, backend._rows, backend._staging, backend._planner = 0, 9, Staging(), Planner()
    batch = Batch.of([0, 5, 6, 9], [0, 1, 2, 3], [0, 1, 2], [9, 9, 9], page_size=16, max_kv_len=100)
    for part in (batch, batch.part(1, 3), batch.part(2, 3, (1, 3))):
        backend._plan_batch(RECORDS[0], part)
    assert launched == [0, 5, 7]


@pytest.mark.parametrize(("said", "wrong"), [((7, None), "prefill_len: got 7"), ((None, 2), "decode_count: got 2")])
def test_a_hint_that_the_host_sees_is_wrong(in_place: InPlace, said: tuple[int | None, int | None], wrong: str) -> None:
    """The lengths lie on the host, page numbers on the GPU: nothing has to be launched to find it out."""
    arrays = np.array([0, 1, 9], np.int32), *[torch.zeros(3, dtype=torch.int32)] * 3
    choice, n, _ = in_place.choose(arrays, (0, 16, 16, 16), 8, 1, None)
    assert (choice.rows, n) == (9, 2)
    for named in (None, RECORDS[0]):
        with pytest.raises(BatchError, match=f"{wrong}, the batch has "):
            in_place.choose(arrays, (0, 16, 16, 16), *said, named)
