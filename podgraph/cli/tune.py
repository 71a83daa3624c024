"""``podgraph tune``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from podgraph.cli.console import CONFIG, JSON, console, print_json, progress_bar
from podgraph.cli.engine import TRACES, cost_options, engine_options, job_of, keep_inputs

if TYPE_CHECKING:
    from podgraph.workload.tuning import Tuning

MOST_BUCKETS = 384  # four values each: a configuration holds 2,048


def _size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    from podgraph.byte_sizes import UNITS, parse

    if value is None or value.isdecimal():
        return None if value is None else int(value)
    try:
        return parse(value)
    except ValueError:
        message = f"{value!r} is no size such as 64MiB, with one of {', '.join(UNITS)}"
        raise click.BadParameter(message, ctx, param) from None


@click.command()
@CONFIG
@TRACES
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="Build configuration to write, with the tuned buckets.",
)
@click.option(
    "--scope",
    type=click.Choice(["step", "attention"]),
    default="step",
    show_default=True,
    help="What graphs hold: the whole model's step, which pays for empty rows, or attention alone.",
)
@click.option(
    "--max-buckets", type=click.IntRange(1, MOST_BUCKETS), default=64, show_default=True, help="Buckets at most."
)
@click.option(
    "--memory-budget",
    callback=_size,
    metavar="SIZE",
    help="Device memory for graphs, regions and kernels, such as 64MiB; one exec for each bucket.",
)
@cost_options
@click.option(
    "--holdout",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.0,
    help="Share of the requests, the last ones, to check on instead.  [default: 0]",
)
@click.option("--token-budget", type=click.IntRange(1), help="Query rows of one step. Needed for request logs.")
@click.option("--max-running", type=click.IntRange(1), help="Requests that run at a time. Needed for request logs.")
@engine_options
@JSON
def tune(
    config: Path,
    traces: tuple[Path, ...],
    output: Path,
    scope: Any,
    max_buckets: int,
    memory_budget: int | None,
    device: str,
    costs: Path | None,
    eager: Any,
    holdout: float,
    token_budget: int | None,
    max_running: int | None,
    columns: str | None,
    bad_rows: Any,
    as_json: bool,
    **engine: Any,
) -> None:
    """Choose the buckets for a workload: those with the least expected time, and how far from the best they can be."""
    from podgraph import whole_file
    from podgraph.config import load_config
    from podgraph.errors import ConfigError
    from podgraph.workload.bad_rows import BadRows
    from podgraph.workload.cost_files import costs_of
    from podgraph.workload.profile import load_profile
    from podgraph.workload.samples import samples_of
    from podgraph.workload.traces import read_log
    from podgraph.workload.tuned_file import tuned_text
    from podgraph.workload.tuning import run_tuning

    keep_inputs([output], [config, *traces, costs])
    build, profile = load_config(config), load_profile(device)
    prices = costs_of(build, profile, scope, costs)
    bad = BadRows(bad_rows)
    log = read_log(traces, columns, bad)
    job = None
    if token_budget is not None and max_running is not None:
        job = job_of(build, device, config, token_budget, max_running, engine)
    with progress_bar() as progress:
        samples = samples_of(log, job, holdout, lambda done, total: progress("simulate", done, total))
    tuning = run_tuning(
        build,
        profile,
        prices,
        samples,
        eager,
        max_buckets=max_buckets,
        memory_budget=memory_budget,
        token_budget=token_budget,
        max_running=max_running,
    )
    text = tuned_text(build, tuning.train[eager].uses, _notes(tuning, config, traces))
    whole_file.write(output, text.encode(), ConfigError)
    if bad.count:
        click.echo(f"podgraph: skipped {bad.count} bad rows", err=True)
    if as_json:
        print_json({"path": str(output), "skipped_rows": bad.count, **tuning.to_dict()})
    else:
        _print(tuning, output)


def _notes(tuning: Tuning, config: Path, traces: tuple[Path, ...]) -> list[str]:
    now = tuning.train[tuning.eager]
    notes = [
        f"{config.name} with buckets for {', '.join(trace.name for trace in traces)}. Written by `podgraph tune`.",
        f"Scope {now.scope}, {now.source}.",
        f"Expected {now.expected_us:,.1f} us a step over {now.steps:,} steps: {now.waste:.3%} above the best possible "
        f"graphs; no set of as many buckets saves more than {tuning.tuned.gap:.4%}.",
    ]
    if now.scope == "step":
        notes.append(
            "A bucket is a graph of the whole model with that many rows: decodes take prefill slots in it. "
            "For a catalog that is replayed for attention alone, tune with --scope attention."
        )
    return notes


def _print(tuning: Tuning, output: Path) -> None:
    now = tuning.train[tuning.eager]
    table = Table("buckets of", "number", "us a step", "waste", "hits", "splits", "misses")
    rows = [(f"this set, {eager}", found) for eager, found in tuning.train.items()]
    rows += [(f"held out, {eager}", found) for eager, found in tuning.heldout.items()]
    rows += [(f"{name}, {tuning.eager}", found) for name, found in tuning.lists.items()]
    for name, found in rows:
        shares = (f"{count / found.steps:.1%}" for count in (found.hits, found.splits, found.misses))
        table.add_row(name, str(len(found.uses)), f"{found.expected_us:,.1f}", f"{found.waste:.3%}", *shares)
    console().print(table)
    for reason, count in now.reasons.items():
        click.echo(f"{count:,} steps beyond every bucket: {reason}")
    click.echo(f"scope {now.scope}, {now.source}")
    click.echo(f"proven: no set of as many buckets saves more than {tuning.tuned.gap:.4%} ({tuning.tuned.method})")
    total, memory = tuning.memory.total(len(tuning.tuned.buckets)), tuning.memory
    click.echo(
        f"device memory {total / (1 << 20):,.1f} MiB (modelled): {memory.dedicated_bytes:,} bytes a bucket, "
        f"{memory.once_bytes:,} once"
    )
    click.echo(
        f"{output}: {len(tuning.tuned.buckets)} buckets, found in {tuning.tune_seconds:.1f} s; "
        f"build them with `podgraph build --config {output}`"
    )
