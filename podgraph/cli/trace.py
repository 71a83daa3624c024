"""``podgraph trace simulate``, ``merge`` and ``show``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from podgraph.cli.console import JSON, console, print_json, progress_bar

if TYPE_CHECKING:
    from podgraph.workload.provenance import Provenance
    from podgraph.workload.steps import StepHistogram

TRACES = click.argument("traces", nargs=-1, required=True, type=click.Path(path_type=Path))
OUTPUT = click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="Histogram to write: Parquet where it ends in .parquet, else CSV.",
)


@click.group()
def trace() -> None:
    """Turn request logs into histograms of engine steps."""


def _shard(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, int] | None:
    if value is None:
        return None
    number, slash, shards = value.partition("/")
    if not (slash and number.isdecimal() and shards.isdecimal() and 1 <= int(number) <= int(shards)):
        raise click.BadParameter(f"{value!r} is not I/N with 1 <= I <= N, such as 2/8", ctx, param)
    return int(number), int(shards)


@trace.command()
@TRACES
@OUTPUT
@click.option("--token-budget", required=True, type=click.IntRange(1), help="Query rows of one step.")
@click.option("--max-running", required=True, type=click.IntRange(1), help="Requests that run at a time.")
@click.option("--max-pages", required=True, type=click.IntRange(1), help="KV pages in all.")
@click.option("--page-size", required=True, type=click.IntRange(1), help="Tokens per KV page.")
@click.option(
    "--policy",
    type=click.Choice(["decode-first", "prefill-first"]),
    default="decode-first",
    show_default=True,
    help="Whose rows a step takes first.",
)
@click.option("--chunk", type=click.IntRange(1), help="Rows of one request's prefill in one step at most.")
@click.option("--max-prefills", type=click.IntRange(1), help="Requests that prefill in one step at most.")
@click.option("--rate", type=click.FloatRange(0, min_open=True), help="Requests per second that arrive.")
@click.option(
    "--load", type=click.FloatRange(0, min_open=True), help="The same, as a share of what the engine sustains."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of arrivals, where the trace has none.")
@click.option(
    "--step-us", type=click.FloatRange(0, min_open=True), default=20_000.0, show_default=True, help="Time of a step."
)
@click.option(
    "--shards", type=click.IntRange(1), help="Pieces of the log, each with an engine of its own.  [default: 1]"
)
@click.option("--shard", callback=_shard, metavar="I/N", help="Simulate only piece I of N, for a later merge.")
@click.option(
    "--engine",
    type=click.Choice(["process", "ray"]),
    default="process",
    show_default=True,
    help="Who runs the pieces: this machine's processors, or a Ray cluster.",
)
@JSON
def simulate(
    traces: tuple[Path, ...],
    output: Path,
    token_budget: int,
    max_running: int,
    max_pages: int,
    page_size: int,
    policy: Any,
    chunk: int | None,
    max_prefills: int | None,
    rate: float | None,
    load: float | None,
    seed: int,
    step_us: float,
    shards: int | None,
    shard: tuple[int, int] | None,
    engine: Any,
    as_json: bool,
) -> None:
    """Serve request logs with a simulated engine, and count its steps."""
    from podgraph.workload.scheduler import SchedulerConfig
    from podgraph.workload.shards import Job, run
    from podgraph.workload.step_files import write_steps
    from podgraph.workload.traces import read_trace

    if rate is not None and load is not None:
        raise click.UsageError("--rate and --load exclude each other")
    if shard is not None and shards not in (None, shard[1]):
        raise click.UsageError(f"--shard {shard[0]}/{shard[1]} and --shards {shards} disagree")
    number, pieces = shard or (None, shards or 1)
    config = SchedulerConfig(token_budget, max_running, max_pages, page_size, policy, chunk, max_prefills)
    job = Job(config, step_us, f"{step_us:g} us a step", rate, load, seed, pieces)
    requests = read_trace(traces[0])
    begin = time.perf_counter()
    with progress_bar() as progress:
        chosen = None if number is None else [number]
        histogram, origin = run(requests, job, chosen, engine, lambda done, total: progress("simulate", done, total))
    seconds = time.perf_counter() - begin
    write_steps(histogram, output, origin)
    _print(histogram, origin, output, as_json, simulate_seconds=round(seconds, 3))


@trace.command()
@TRACES
@OUTPUT
@JSON
def merge(traces: tuple[Path, ...], output: Path, as_json: bool) -> None:
    """Add histograms up, such as those of the shards of one log."""
    from podgraph.workload.step_files import merge_files, read_provenance

    histogram = merge_files(traces, output)
    _print(histogram, read_provenance(output), output, as_json)


@trace.command()
@click.argument("file", type=click.Path(path_type=Path))
@JSON
def show(file: Path, as_json: bool) -> None:
    """Summarise a histogram, a step log or a request log."""
    from podgraph.workload.step_files import read_provenance
    from podgraph.workload.traces import read_steps

    _print(read_steps(file), read_provenance(file), None, as_json)


def _print(
    histogram: StepHistogram, origin: Provenance | None, output: Path | None, as_json: bool, **more: object
) -> None:
    from podgraph.workload.summary import describe

    facts: dict[str, Any] = {"path": None if output is None else str(output), **describe(histogram, origin), **more}
    if as_json:
        print_json(facts)
        return
    table = Table("", *facts["percentiles"]["prefill_len"])
    for name, values in facts["percentiles"].items():
        table.add_row(name, *(f"{value:,}" for value in values.values()))
    console().print(table)
    click.echo(f"{facts['steps']:,} steps, {facts['distinct']:,} distinct")
