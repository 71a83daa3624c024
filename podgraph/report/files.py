"""The files of a report: all of them are made before the first is written, and each is written whole or not at all."""

from __future__ import annotations

from pathlib import Path

from podgraph import whole_file
from podgraph.errors import ConfigError
from podgraph.report.bucket_rows import csv_text
from podgraph.report.content import Report


def write_files(
    report: Report, page: Path | None = None, table: Path | None = None, png: Path | None = None
) -> list[Path]:
    """Writes what has a path.

    Args:
        report: the content.
        page: of the HTML page.
        table: of the CSV with a row for each bucket.
        png: of the picture of memory against time and coverage.

    Returns:
        The paths, in that order.

    Raises:
        ConfigError: two paths are the same, one cannot be written, or matplotlib or jinja2 is not installed.
    """
    wanted = [path for path in (page, table, png) if path is not None]
    if len({path.absolute() for path in wanted}) < len(wanted):
        raise ConfigError(f"{wanted[0]}: got one name for two files of the report; name them apart")
    made: list[tuple[Path, bytes]] = []
    try:
        if page is not None:
            from podgraph.report.page import render

            # names that are no text, of files that the operating system allows, become question marks
            made.append((page, render(report).encode(errors="replace")))
        if table is not None:
            made.append((table, csv_text(report).encode()))
        if png is not None:
            from podgraph.report.figures import pareto_png

            made.append((png, pareto_png(report)))
    except ImportError as e:
        name = (e.name or "a library").partition(".")[0]
        raise ConfigError(f"the report's page and picture need {name}; pip install 'podgraph[report]'") from None
    for path, data in made:
        whole_file.write(path, data, ConfigError)
    return [path for path, _ in made]
