"""The command line: parse, one library call, print. Exit 0 success, 1 failure, 2 usage."""

from __future__ import annotations

from typing import Any

import click

import podgraph
from podgraph.cli import build, catalog, config, replay, report, stats, trace, tune
from podgraph.errors import PodgraphError


class _Group(click.Group):
    """Turns podgraph's own errors into one line, in one place."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except PodgraphError as e:
            click.echo(f"podgraph: {e}", err=True)
            ctx.exit(1)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(podgraph.__version__, prog_name="podgraph")
def main() -> None:
    """Catalogs of CUDA graphs of POD attention: build once, replay anywhere."""


for command in (
    config.buckets,
    config.config,
    build.compile_,
    build.build,
    catalog.inspect,
    catalog.verify,
    replay.replay,
    stats.stats,
    trace.trace,
    tune.tune,
    report.report,
):
    main.add_command(command)
