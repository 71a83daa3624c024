"""What the commands share: options, tables, JSON, the progress bar."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from podgraph.shapes import Bucket

CONFIG = click.option(
    "--config", "-c", required=True, type=click.Path(path_type=Path), help="YAML build configuration."
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")
KERNELS = click.option(
    "--kernels",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("~/.cache/podgraph/kernels").expanduser,
    show_default="~/.cache/podgraph/kernels",
    help="Folder of compiled kernels; missing ones are compiled into it.",
)
CATALOG = click.argument("file", type=click.Path(path_type=Path))


class Report(Protocol):
    def __call__(self, stage: str, done: int, total: int) -> None: ...


@contextmanager
def progress_bar() -> Iterator[Report]:
    """A progress bar on a terminal's standard error, nothing elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda stage, done, total: None
        return
    columns = (TextColumn("{task.description:<8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        tasks: dict[str, Any] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done)

        yield report


def console() -> Console:
    # a table that is read by a program or a log must not be folded to 80 columns
    console = Console()
    return console if console.is_terminal else Console(width=160)


def plain_table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table of thousands of rows, where rich would take milliseconds for each."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(left: str, cells: Iterable[str], between: str, right: str) -> str:
        return left + between.join(cells) + right

    def rule(left: str, dash: str, between: str, right: str) -> str:
        return line(left, (dash * (width + 2) for width in widths), between, right)

    def cells(row: tuple[str, ...]) -> list[str]:
        return [f" {cell:>{width}} " for cell, width in zip(row, widths, strict=True)]

    top, head, bottom = rule("┏", "━", "┳", "┓"), rule("┡", "━", "╇", "┩"), rule("└", "─", "┴", "┘")
    return "\n".join(
        [top, line("┃", cells(header), "┃", "┃"), head, *(line("│", cells(r), "│", "│") for r in rows), bottom]
    )


def shape(bucket: Bucket) -> tuple[str, str, str]:
    return str(bucket.batch), str(bucket.prefill_len), str(bucket.decode_count)


def print_json(document: Any) -> None:
    click.echo(json.dumps(document, indent=2))
