"""``podgraph trace simulate``, ``merge`` and ``show``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from podgraph.cli.console import JSON, console, print_json, progress_bar

if TYPE_CHECKING:
    from podgraph.workload.bad_rows import BadRows
    from podgraph.workload.scheduler import StepCost

TRACES = click.argument("traces", nargs=-1, required=True, type=click.Path(path_type=Path))
OUTPUT = click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="Histogram to write: Parquet where it ends in .parquet, else CSV.",
)
COLUMNS = click.option(
    "--columns", help="Columns of a layout of your own: arrival=A,input_len=B,output_len=C,time_unit=s|ms|us|ns|date."
)
BAD_ROWS = click.option(
    "--bad-rows",
    type=click.Choice(["skip", "fail"]),
    default="skip",
    show_default=True,
    help="What a row that cannot be read does.",
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
    "--step-us", type=click.FloatRange(0, min_open=True), help="Microseconds of every step.  [default: 20000]"
)
@click.option("--device", help="Profile of the GPU that steps are timed on, such as h200, or a profile's path.")
@click.option(
    "--config", "-c", type=click.Path(path_type=Path), help="Build configuration of the model that is timed there."
)
@COLUMNS
@BAD_ROWS
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
    step_us: float | None,
    device: str | None,
    config: Path | None,
    columns: str | None,
    bad_rows: Any,
    shards: int | None,
    shard: tuple[int, int] | None,
    engine: Any,
    as_json: bool,
) -> None:
    """Serve request logs with a simulated engine, and count its steps."""
    from podgraph.workload.bad_rows import BadRows
    from podgraph.workload.scheduler import SchedulerConfig
    from podgraph.workload.shards import Job, run
    from podgraph.workload.step_files import write_steps
    from podgraph.workload.summary import describe_steps
    from podgraph.workload.traces import read_trace

    if rate is not None and load is not None:
        raise click.UsageError("--rate and --load exclude each other")
    if shard is not None and shards not in (None, shard[1]):
        raise click.UsageError(f"--shard {shard[0]}/{shard[1]} and --shards {shards} disagree")
    chosen, pieces = ([shard[0]], shard[1]) if shard else (None, shards or 1)
    limits = SchedulerConfig(token_budget, max_running, max_pages, page_size, policy, chunk, max_prefills)
    cost, name = _cost(step_us, device, config)
    job = Job(limits, cost, name, rate, load, seed, pieces)
    bad = BadRows(bad_rows)
    requests = read_trace(traces, columns=columns, bad=bad)
    begin = time.perf_counter()
    with progress_bar() as progress:
        histogram, origin = run(requests, job, chosen, engine, lambda done, total: progress("simulate", done, total))
    seconds = time.perf_counter() - begin
    written = write_steps(histogram, output, origin)
    _warn(bad)
    facts = {"path": str(output), "skipped_rows": bad.count, **describe_steps(histogram, origin)}
    if as_json:
        print_json(facts | {"simulate_seconds": seconds})
        return
    _print_steps(facts)
    click.echo(f"{output}: {written:,} bytes, simulated in {seconds:.1f} s")


@trace.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@OUTPUT
@JSON
def merge(files: tuple[Path, ...], output: Path, as_json: bool) -> None:
    """Add histograms up, such as those of the shards of one log."""
    from podgraph.workload.step_files import merge_files
    from podgraph.workload.summary import describe_steps

    histogram, origin = merge_files(files, output)
    facts = {"path": str(output), "files": [str(file) for file in files], **describe_steps(histogram, origin)}
    if as_json:
        print_json(facts)
        return
    _print_steps(facts)
    click.echo(f"{output}: the sum of {len(files)} files")


@trace.command()
@click.argument("file", type=click.Path(path_type=Path))
@COLUMNS
@BAD_ROWS
@JSON
def show(file: Path, columns: str | None, bad_rows: Any, as_json: bool) -> None:
    """Summarise a histogram, a step log or a request log."""
    from podgraph.workload.bad_rows import BadRows
    from podgraph.workload.requests import Trace
    from podgraph.workload.step_files import read_provenance
    from podgraph.workload.summary import describe_requests, describe_steps
    from podgraph.workload.traces import read_log

    bad = BadRows(bad_rows)
    log = read_log(file, columns, bad)
    facts = describe_requests(log) if isinstance(log, Trace) else describe_steps(log, read_provenance(file))
    if as_json:
        print_json({"path": str(file), **facts, "skipped_rows": bad.count, "bad_rows": list(bad.shown)})
        return
    _warn(bad)
    (_print_requests if isinstance(log, Trace) else _print_steps)(facts)


def _cost(step_us: float | None, device: str | None, config: Path | None) -> tuple[StepCost | float, str]:
    """How long a step takes, and what to call that."""
    from podgraph.workload.simulation import DEFAULT_STEP_US

    if device is None and config is None:
        cost = DEFAULT_STEP_US if step_us is None else step_us
        return cost, f"{cost:g} us a step"
    if device is None or config is None or step_us is not None:
        raise click.UsageError("--device and --config go together, and without --step-us")
    from podgraph.workload.modelled_step import modelled_step

    return modelled_step(device, config)


def _warn(bad: BadRows) -> None:
    """Bad rows, on standard error: the result stands without them."""
    for row in bad.shown:
        click.echo(f"podgraph: skipped {row}", err=True)
    if bad.count > len(bad.first):
        click.echo(f"podgraph: skipped {bad.count} rows in all", err=True)


def _print_percentiles(facts: dict[str, Any]) -> None:
    percentiles = facts["percentiles"]
    table = Table(facts["kind"], *next(iter(percentiles.values())))
    for name, values in percentiles.items():
        table.add_row(name, *(f"{value:,}" for value in values.values()))
    console().print(table)


def _print_requests(facts: dict[str, Any]) -> None:
    _print_percentiles(facts)
    when = "no arrival times"
    if facts["span_s"] is not None:
        when = f"over {facts['span_s']:,.1f} s" + (f", {facts['rate']:.3g} a second" if facts["rate"] else "")
    click.echo(
        f"{facts['requests']:,} requests, {when}; {facts['input_tokens']:,} input tokens, "
        f"{facts['output_tokens']:,} output tokens; {facts['skipped_rows']:,} rows skipped"
    )


def _print_steps(facts: dict[str, Any]) -> None:
    _print_percentiles(facts)
    table = Table(*facts["top"][0], "share")
    for shape in facts["top"]:
        table.add_row(*(f"{value:,}" for value in shape.values()), f"{shape['steps'] / facts['steps']:.1%}")
    console().print(table)
    shares = ", ".join(f"{share:.1%} {name}" for name, share in facts["shares"].items())
    click.echo(f"{facts['steps']:,} steps, {facts['distinct']:,} distinct: {shares}")
    if simulation := facts["simulation"]:
        rates = "".join(f", {rate:.4g} a second" for rate in simulation["rates"])
        click.echo(
            f"{simulation['requests']:,} requests{rates}: {simulation['finished']:,} finished, "
            f"{simulation['dropped']:,} dropped, {simulation['preempted']:,} preempted"
        )
