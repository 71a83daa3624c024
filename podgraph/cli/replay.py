"""``podgraph replay``, and what `podgraph stats` shares with it: the options and the replay itself."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from rich.table import Table

from podgraph.cli.console import CATALOG, JSON, console, print_json, progress_bar

if TYPE_CHECKING:
    from podgraph.replay import ReplayReport

F = TypeVar("F", bound=Callable[..., Any])

REPLAY_OPTIONS = (
    CATALOG,
    click.option("--trace", required=True, type=click.Path(path_type=Path), help="Request log."),
    click.option("--limit", type=click.IntRange(1), default=200, show_default=True, help="Steps to replay."),
    click.option(
        "--rate", type=click.FloatRange(0, min_open=True), help="Requests per second, instead of the trace's own."
    ),
    click.option("--spec", help="Specification, where the catalog holds several."),
    click.option("--seed", type=int, default=0, show_default=True, help="Of the data and the order within a step."),
)


def replay_options(command: F) -> F:
    """Adds them; the command gets what `replayed` takes."""
    for option in reversed(REPLAY_OPTIONS):
        command = option(command)
    return command


def replayed(
    file: Path, trace: Path, limit: int, rate: float | None, spec: str | None, seed: int
) -> tuple[ReplayReport, dict[str, Any]]:
    """Replays a trace as the options say; returns what happened, and what it was done with."""
    from podgraph import open as open_catalog
    from podgraph.replay import replay_trace
    from podgraph.verify import use_one_thread
    from podgraph.workload.traces import at_rate, read_trace

    catalog = open_catalog(file)
    use_one_thread(catalog)
    requests = read_trace(trace)
    if rate is not None:
        requests = at_rate(requests, rate)
    with progress_bar() as progress:
        report = replay_trace(
            catalog, requests, spec=spec, limit=limit, seed=seed, progress=lambda n: progress("replay", n, limit)
        )
    return report, {"path": str(file), "trace": str(trace), "skipped_rows": requests.skipped}


@click.command()
@replay_options
@JSON
def replay(as_json: bool, **options: Any) -> None:
    """Schedule a request trace, replay its steps, and compare each with a float32 reference."""
    from podgraph.replay import describe

    report, source = replayed(**options)
    facts = describe(report)
    if as_json:
        print_json({**source, **facts})
    else:
        _print_replay(facts)
    if report.failures:
        sys.exit(1)


def _print_replay(facts: dict[str, Any]) -> None:
    table = Table("bucket", "replays", "share")
    for bucket, count in facts["replays"].items():
        table.add_row(bucket, str(count), f"{count / facts['replays_total']:.1%}")
    console().print(table)
    click.echo(
        f"{facts['steps']} steps of {facts['requests']} requests, {facts['rows']:,} query rows: "
        f"{facts['steps_in_one_replay']} steps in one replay each, {sum(facts['splits'].values())} split"
    )
    if facts["too_long"]:
        click.echo(f"left out {facts['too_long']} requests of the trace: longer than workspace.max_kv_len")
    for reason, count in facts["splits"].items():
        click.echo(f"split {count} steps: {reason}")
    click.echo(
        f"padding: {facts['padded_rows_share']:.1%} of prefill rows and {facts['padded_slots_share']:.1%} of request "
        "slots were empty (empty ones are not computed)"
    )
    verdict = f"{facts['failures']} steps beyond their bound" if facts["failures"] else "every step within its bound"
    click.echo(f"worst relative error {facts['worst_error']:.1e} (allowed {facts['bound']:.1e}): {verdict}")
