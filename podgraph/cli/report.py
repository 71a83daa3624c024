"""``podgraph report``."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from podgraph.cli.console import JSON, console, print_json, progress_bar
from podgraph.cli.engine import TRACES, engine_options, job_of

if TYPE_CHECKING:
    from podgraph.report.content import Report, Source
    from podgraph.workload.costs import Scope

MIB = 1 << 20
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
@click.option(
    "--device", default="h200", show_default=True, help="Profile of the GPU, by its name or the path of a file."
)
@click.option(
    "--costs",
    type=click.Path(path_type=Path),
    help="CSV of what buckets cost: rows,us or batch,prefill_len,decode_count,us.",
)
@click.option(
    "--eager",
    type=click.Choice(["penalty", "hidden"]),
    default="penalty",
    show_default=True,
    help="A step without a graph: the host's time on top of the GPU's, or the longer of the two.",
)
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
    from podgraph.models import save
    from podgraph.report.content import engine_limits, make_report
    from podgraph.workload.bad_rows import BadRows
    from podgraph.workload.cost_files import costs_of
    from podgraph.workload.profile import load_profile
    from podgraph.workload.samples import samples_of
    from podgraph.workload.traces import read_log

    about, profile = _source(source), load_profile(device)
    build = about.build
    chosen: Scope = scope or ("attention" if build.model is None else "step")
    prices = costs_of(build, profile, chosen, costs)
    bad = BadRows(bad_rows)
    log = read_log(traces, columns, bad)
    rows, requests = engine_limits(build)
    config = source if about.catalog is None else None
    job = job_of(build, device, config, token_budget or max(rows, max_running or 0), max_running or requests, engine)
    with progress_bar() as progress:
        steps = samples_of(log, job, progress=lambda done, total: progress("simulate", done, total)).whole
    found = make_report(about, steps, prices, profile, eager)
    written = []
    if output is not None:
        from podgraph.report.page import render

        save(render(found, prices), output)
        written.append(output)
    if table is not None:
        save(_csv(found), table)
        written.append(table)
    if png is not None:
        from podgraph.report.figures import pareto

        _save_bytes(pareto(found, "png"), png)
        written.append(png)
    if bad.count:
        click.echo(f"podgraph: skipped {bad.count} bad rows", err=True)
    if as_json:
        print_json({"written": [str(path) for path in written], "skipped_rows": bad.count, **found.to_dict()})
        return
    _print(found)
    for path in written:
        click.echo(f"{path}: written")


def _source(path: Path) -> Source:
    """A catalog by its name, else a configuration."""
    from podgraph.catalog import store
    from podgraph.config import load_config
    from podgraph.report.content import Source, source_of_catalog

    if path.suffix == store.SUFFIX:
        return source_of_catalog(path, store.read(path))
    return Source(path.name, load_config(path))


def _save_bytes(data: bytes, path: Path) -> None:
    from podgraph import whole_file
    from podgraph.errors import ConfigError

    try:
        whole_file.write(path, data)
    except OSError as e:
        raise ConfigError(f"{path}: cannot be written: {e.strerror or e}") from e


def _csv(found: Report) -> str:
    now = found.now[found.eager]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    header = ("batch", "prefill_len", "decode_count", "steps", "share", "padded_rows", "padding_us", "us", "replay_us")
    writer.writerow(header)
    for use in now.uses:
        b = use.bucket
        shape = (b.batch, b.prefill_len, b.decode_count)
        measured = found.measured.get(b, "")
        writer.writerow([*shape, use.steps, use.share, use.padded_rows, use.padding_us, use.us, measured])
    return text.getvalue()


def _print(found: Report) -> None:
    now = found.now[found.eager]
    table = Table("buckets of", "number", "memory MiB", "one replay", "us a step", "waste", "gap")
    for p in found.points:
        name = {"this": found.source.name, "best": "best for these steps"}.get(p.name, p.name)
        gap = "" if p.gap is None else f"{p.gap:.3%}"
        mib = f"{p.dedicated_bytes / MIB:,.1f}"
        table.add_row(name, str(p.buckets), mib, f"{p.covered:.1%}", f"{p.expected_us:,.1f}", f"{p.waste:.3%}", gap)
    console().print(table)
    for reason, count in now.reasons.items():
        click.echo(f"{count:,} steps beyond every bucket: {reason}")
    for word, changes in (("add", found.add), ("drop", found.drop)):
        for change in changes[:1]:
            gain = change.gain_us
            worth = f"saves {gain:,.2f} us a step" if gain > 0 else f"costs {abs(gain):,.2f} us a step"
            click.echo(f"{word} next: {change.bucket}, {worth}")
    memory, count = found.memory, len(found.source.build.buckets)
    kind = "modelled" if memory.modelled else "measured"
    click.echo(
        f"{now.steps:,} steps: {now.hits / now.steps:.1%} in one replay, {now.splits / now.steps:.1%} split, "
        f"{now.misses / now.steps:.1%} without a graph; {now.padded_rows:.1%} of replayed rows are empty"
    )
    click.echo(
        f"device memory {memory.total(count) / MIB:,.1f} MiB with a graph for each bucket, "
        f"{memory.total(count, shared=True) / MIB:,.1f} MiB where they share one ({kind})"
    )
    click.echo(f"scope {now.scope}, {now.source}")
