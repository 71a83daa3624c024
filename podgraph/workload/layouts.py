"""The columns that logs are known by: request logs of several origins, and step logs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from podgraph.errors import TraceError
from podgraph.workload.steps import KEY, SUMS

# qo_indptr and the KV lengths are int32.
MAX_TOKENS = 2**31 - 1
# Beyond it a sum over few rows would not fit int64.
MAX_SUM = 2**62

TimeUnit = Literal["date", "s", "ms", "us", "ns"]
UNITS_PER_S: dict[TimeUnit, int] = {"date": 10**9, "s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


@dataclass(frozen=True)
class Count:
    """One column of whole numbers.

    Attributes:
        role: what podgraph calls it.
        column: what the file calls it.
        least, most: its range.
        default: what it is where the file has no such column; None where the file must have it.
    """

    role: str
    column: str
    least: int = 0
    most: int = MAX_TOKENS
    default: int | None = None


@dataclass(frozen=True)
class Layout:
    """The columns of one kind of log.

    Attributes:
        name: what an error calls it.
        counts: its columns of whole numbers.
        arrival: column of the arrival time, or None where the log has none.
        time_unit: of ``arrival``; ``date`` is ``YYYY-MM-DD HH:MM:SS`` with up to 9 decimals and perhaps a UTC offset.
    """

    name: str
    counts: tuple[Count, ...]
    arrival: str | None = None
    time_unit: TimeUnit = "s"

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that a file must have."""
        needed = tuple(count.column for count in self.counts if count.default is None)
        return needed if self.arrival is None else (self.arrival, *needed)

    @property
    def is_steps(self) -> bool:
        """Whether rows are engine steps, not requests."""
        return self.counts[0].role in KEY

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(self.columns)})"


def request_layout(
    name: str, input_len: str, output_len: str, arrival: str | None = None, time_unit: TimeUnit = "s"
) -> Layout:
    """A layout with a prompt and a generated length in each row."""
    return Layout(name, (Count("input_len", input_len, 1), Count("output_len", output_len)), arrival, time_unit)


# The first layout whose columns are all there is taken.
LAYOUTS = (
    request_layout("Azure", "ContextTokens", "GeneratedTokens", "TIMESTAMP", "date"),
    request_layout("Mooncake", "input_length", "output_length", "timestamp", "ms"),
    request_layout("ShareGPT", "input_toks", "output_toks", "arrival_time_ns", "ns"),
    request_layout("BurstGPT", "Request tokens", "Response tokens", "Timestamp", "s"),
    request_layout("POD", "num_prefill_tokens", "num_decode_tokens"),
)
STEP_LAYOUT = Layout(
    "step log",
    (
        *(Count(name, name) for name in KEY),
        *(Count(n, n, int(n == "steps"), MAX_SUM, int(n == "steps")) for n in SUMS),
    ),
)


def find_layout(columns: Iterable[str], layouts: Iterable[Layout]) -> Layout | None:
    """The first layout whose columns are all there."""
    there = set(columns)
    return next((layout for layout in layouts if there.issuperset(layout.columns)), None)


def parse_columns(text: str) -> Layout:
    """The layout that ``arrival=a,input_len=b,output_len=c,time_unit=ms`` names.

    ``arrival`` and ``time_unit`` (seconds unless given) may be left out.

    Raises:
        TraceError: another form or name, a name twice, or one that is missing.
    """
    allowed = "input_len=COLUMN,output_len=COLUMN and perhaps arrival=COLUMN,time_unit=s|ms|us|ns|date"
    named: dict[str, str] = {}
    for entry in text.split(","):
        role, equals, column = (part.strip() for part in entry.partition("="))
        if not equals or not column or role not in ("arrival", "input_len", "output_len", "time_unit") or role in named:
            raise TraceError(f"columns: got {entry!r:.100}, allowed: {allowed}, each once")
        named[role] = column
    if missing := [role for role in ("input_len", "output_len") if role not in named]:
        raise TraceError(f"columns: {missing[0]} is missing in {text!r:.200}; give {allowed}")
    unit = named.get("time_unit", "s")
    if unit not in get_args(TimeUnit) or ("time_unit" in named and "arrival" not in named):
        raise TraceError(f"columns: time_unit: got {unit!r:.40}, allowed: s, ms, us, ns or date, beside an arrival")
    return request_layout("columns", named["input_len"], named["output_len"], named.get("arrival"), unit)  # type: ignore[arg-type]
