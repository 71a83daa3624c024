"""``podgraph report``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.markup import escape
from rich.table import Table

from podgraph.cli.console import JSON, console, print_json, progress_bar, shape
from podgraph.cli.engine import TRACES, cost_options, engine_options, job_of, keep_inputs

if TYPE_CHECKING:
    from podgraph.report.content import Report

_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command()
@click.argument("source", type=click.Path(path_type=Path))
@TRACES
@click.option("-o", "--output", type=_FILE, help="HTML page to write, one file that needs no other.")
@click.option("--csv", "table", type=_FILE, help="CSV to write, one row for each bucket.")
@click.option("--png", type=_FILE, help="Picture to write: memory against time and coverage.")
@click.option(
    "--scope",
    type=click.Choice(["step", "attention"]),
    help="What graphs hold.  [default: step where the configuration has a model, else attention]",
)
@click.option("--model", type=click.Path(path_type=Path), help="Configuration whose model section holds for a catalog.")
@click.option(
    "--build-log", type=click.Path(path_type=Path), help="What `podgraph build --json` printed, for the build's time."
)
@cost_options
@click.option("--token-budget", type=click.IntRange(1), help="Query rows of one step.  [default: the largest bucket's]")
@click.option(
    "--max-running", type=click.IntRange(1), help="Requests that run at a time.  [default: the largest bucket's]"
)
@engine_options
@JSON
def report(
    source: Path,
    traces: tuple[Path, ...],
    output: Path | None,
    table: Path | None,
    png: Path | None,
    scope: Any,
    model: Path | None,
    build_log: Path | None,
    device: str,
    costs: Path | None,
    eager: Any,
    token_budget: int | None,
    max_running: int | None,
    columns: str | None,
    bad_rows: Any,
    as_json: bool,
    **engine: Any,
) -> None:
    """Show what the buckets of SOURCE, a catalog or a configuration, do for a workload: memory against coverage."""
    from podgraph.report.content import make_report
    from podgraph.report.files import write_files
    from podgraph.report.source import engine_limits, read_source, workload_of
    from podgraph.workload.bad_rows import BadRows
    from podgraph.workload.cost_files import costs_of
    from podgraph.workload.profile import load_profile
    from podgraph.workload.requests import Trace
    from podgraph.workload.samples import samples_of
    from podgraph.workload.traces import read_log

    keep_inputs([output, table, png], [source, *traces, model, build_log, costs])
    about, profile = read_source(source, model, build_log), load_profile(device)
    build = about.build
    prices = costs_of(build, profile, scope or ("attention" if build.model is None else "step"), costs)
    bad = BadRows(bad_rows)
    log = read_log(traces, columns, bad)
    limits, job = None, None
    if isinstance(log, Trace) or token_budget is not None or max_running is not None:
        limits = engine_limits(build, token_budget, max_running)
        job = job_of(build, device, source if about.catalog is None else model, *limits, engine)
    with progress_bar() as progress:
        steps = samples_of(log, job, progress=lambda done, total: progress("simulate", done, total)).train
        workload = workload_of(log, traces, steps, limits)
        found = make_report(
            about, workload, prices, profile, eager, lambda done, total: progress("search", done, total)
        )
    written = write_files(found, output, table, png)
    if bad.count:
        click.echo(f"podgraph: skipped {bad.count} bad rows", err=True)
    if as_json:
        print_json({"written": [str(path) for path in written], "skipped_rows": bad.count, **found.to_dict()})
        return
    _print(found)
    for path in written:
        click.echo(f"{path}: written")


def _print(found: Report) -> None:
    """What the page says, without its pictures."""
    from podgraph.report import formats

    now, count, timed = found.now[found.eager], len(found.source.build.buckets), found.timed
    counted, memory = found.workload.counted, found.memory
    kind = "modelled" if memory.modelled else "measured"
    sets = Table(
        "buckets of",
        "number",
        "memory",
        f"one replay, {counted}",
        f"us a step, {timed}",
        f"waste, {timed}",
        "gap",
    )
    for p in found.points:
        name = {"this": escape(found.source.name), "best": "best of its size"}.get(p.name, p.name)
        sets.add_row(
            name,
            str(p.buckets),
            f"{formats.size(p.dedicated_bytes)} {'modelled' if p.modelled else 'measured'}",
            formats.percent(p.covered),
            formats.microseconds(p.expected_us),
            formats.percent(p.waste),
            "" if p.gap is None else f"<= {formats.bound(p.gap)}",
        )
    console().print(sets)
    served = Table(
        "a step without a graph costs", "one replay", "split", "no bucket", "eager is cheaper",
        f"of the time in one replay, {timed}", f"us a step, {timed}", "waste",
    )  # fmt: skip
    for eager, c in found.now.items():
        shares = (n / max(1, c.steps) for n in (c.hits, c.splits, c.misses, c.cheaper_eager))
        times = (formats.percent(c.hit_time), formats.microseconds(c.expected_us), formats.percent(c.waste))
        served.add_row(formats.EAGER_NAMES[eager], *map(formats.percent, shares), *times)
    console().print(served)
    for reason, missed in now.reasons.items():
        click.echo(f"{missed:,} steps that no bucket holds: {reason}")
    if found.unused:
        click.echo(f"{len(found.unused)} buckets serve no step: without them {formats.size(found.unused_bytes)} less")
    changes = Table("change", "batch", "prefill_len", "decode_count", f"us a step, {timed}", "waste", "one replay")
    for word, made in (("add", found.add), ("drop", found.drop)):
        for index, change in enumerate(made):
            worth = f"{'saves' if change.gain_us > 0 else 'costs'} {formats.microseconds(abs(change.gain_us))}"
            after = (worth, formats.percent(change.waste), formats.percent(change.covered))
            changes.add_row(f"then {word}" if index else word, *shape(change.bucket), *after)
    if changes.row_count:
        console().print(changes)
    click.echo(
        f"{now.steps:,} steps of {found.workload.name} ({counted}): {formats.percent(now.padded_rows)} of replayed "
        f"rows are empty, {formats.microseconds(now.padding_us)} us a step ({timed})"
    )
    click.echo(
        f"device memory ({kind}) {formats.size(memory.total(count))} with a graph for each bucket, "
        f"{formats.size(memory.total(count, shared=True))} where they share graphs; of that, once: "
        f"regions {formats.size(memory.region_bytes)}, images {formats.size(memory.image_bytes)}"
    )
    if found.source.file_bytes:
        seconds = found.source.build_seconds
        built = f", built in {sum(seconds.values()):,.1f} s" if seconds else ""
        click.echo(f"file {found.source.file_bytes:,} bytes{built} (measured)")
    click.echo(f"scope {now.scope}, {now.source}")
