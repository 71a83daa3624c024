"""The time of requests over several files and runs."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from podgraph.errors import TraceError
from podgraph.workload.bad_rows import BadRows
from podgraph.workload.fields import Time
from podgraph.workload.layouts import UNITS_PER_S, Layout
from podgraph.workload.text_rows import Batch


class Clock:
    """Turns the times of one file after the other into seconds since the first request."""

    def __init__(self) -> None:
        self.has_arrivals = True
        self._at: tuple[str, int] | None = None
        self._layout: Layout | None = None
        # Of the present clock: its zero in units of the layout, the last good time, and where its zero is in seconds.
        self._zero: Time = 0
        self._last: Time = -math.inf
        self._offset_s = 0.0
        self._end_s = 0.0

    def read(self, batch: Batch, name: str, bad: BadRows) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.intp]]:
        """(arrivals in seconds, which rows they belong to) of the rows that do not go back."""
        n = len(batch.places)
        has_arrivals = batch.layout.arrival is not None
        if n and self._layout is not None and has_arrivals != self.has_arrivals:
            raise TraceError(
                f"{name}: has {'' if has_arrivals else 'no '}arrival times, unlike the file ahead; read it alone"
            )
        if not n or not has_arrivals:
            self.has_arrivals = has_arrivals if n or self._layout is None else self.has_arrivals
            self._layout = batch.layout if n else self._layout
            return np.zeros(n), np.arange(n)
        times = batch.times
        self._start(batch, name, times[0])
        kept = np.arange(n)
        if isinstance(times, list) or times[0] < self._last or (np.diff(times) < 0).any():
            listed: list[Time] = times if isinstance(times, list) else times.tolist()
            kept = self._in_order(listed, batch, name, bad)
            listed = [listed[index] for index in kept.tolist()]
            since: npt.NDArray[np.float64] = np.array([float(time - self._zero) for time in listed], dtype=np.float64)
            self._last = listed[-1] if listed else self._last
        else:
            since = (times - self._zero).astype(np.float64)
            self._last = times[-1].item()
        arrival_s = self._offset_s + since / UNITS_PER_S[batch.layout.time_unit]
        if arrival_s.size:
            self._end_s = float(arrival_s[-1])
        return arrival_s, kept

    def _start(self, batch: Batch, name: str, first: Time) -> None:
        """Begins a new clock where another file, or another run in it, does not go on with the present one."""
        at, before = (name, batch.segment), self._layout
        if at == self._at:
            return
        goes_on = before is not None and before == batch.layout and first >= self._last
        if before is not None and not goes_on and before.time_unit == batch.layout.time_unit == "date":
            raise TraceError(f"{name}: begins before the file ahead of it ends; name the files in order of time")
        if not goes_on:
            self._zero = first if isinstance(first, (int, float)) else first.item()
            self._last = -math.inf
            self._offset_s = self._end_s
        self._at, self._layout = at, batch.layout
        self.has_arrivals = True

    def _in_order(self, times: list[Time], batch: Batch, name: str, bad: BadRows) -> npt.NDArray[np.intp]:
        kept = []
        last = self._last
        for index, time in enumerate(times):
            if time < last:
                back_s = (last - time) / UNITS_PER_S[batch.layout.time_unit]
                place = f"{batch.unit} {batch.places[index]}"
                bad.add(
                    name, place, f"{batch.layout.arrival}: must not go back, got {back_s:g} s before a row ahead of it"
                )
            else:
                last = time
                kept.append(index)
        return np.array(kept, dtype=np.intp)
