"""``podgraph stats``."""

from __future__ import annotations

import sys
from typing import Any

import click
from rich.table import Table

from podgraph.cli.console import JSON, console, print_json
from podgraph.cli.replay import replay_options, replayed


@click.command()
@replay_options
@JSON
@click.option("--prometheus", is_flag=True, help="Print what a scrape would get, in Prometheus' text format.")
def stats(as_json: bool, prometheus: bool, **options: Any) -> None:
    """Replay a request trace as `replay` does, and print what a serving process would have counted."""
    if as_json and prometheus:
        raise click.UsageError("--json and --prometheus exclude each other")
    report, source = replayed(**options)
    counters = report.counters.to_dict()
    if prometheus:
        from podgraph.dispatch.metrics import text

        click.echo(text(report.counters, report.memory), nl=False)
    elif as_json:
        facts = {"steps": report.steps, "failures": report.failures}
        print_json({**source, **facts, "counters": counters, "memory": report.memory})
    else:
        _print_stats(counters, report.memory)
    if report.failures:
        click.echo(f"podgraph: {report.failures} of {report.steps} steps are beyond their error bound", err=True)
        sys.exit(1)


def _print_stats(counters: dict[str, Any], memory: dict[str, int]) -> None:
    table = Table("counter", "of", "count")
    for name, count in counters.items():
        if isinstance(count, dict):
            for key, number in sorted(count.items(), key=lambda item: -item[1]):
                table.add_row(name, key, f"{number:,}")
        else:
            table.add_row(name, "", f"{count:,}")
    for kind, size in memory.items():
        table.add_row("memory", kind, f"{size:,} bytes")
    console().print(table)
