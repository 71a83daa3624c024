"""The report as one HTML file that needs nothing else: no network, no script, no other file."""

from __future__ import annotations

import base64
from importlib import resources

from podgraph.report import figures
from podgraph.report.content import Report
from podgraph.report.formats import FORMATS

# of tables on the page; the CSV has every bucket
MOST_BUCKETS, MOST_CELLS = 100, 12


def render(report: Report) -> str:
    """The whole page; every name in it is escaped. The same for the same report."""
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= FORMATS
    template = environment.from_string(resources.files("podgraph.report").joinpath("page.html.jinja").read_text())
    now = report.now[report.eager]
    return template.render(
        report=report,
        now=now,
        names=figures.NAMES,
        buckets=len(report.source.build.buckets),
        uses=sorted(now.uses, key=lambda use: (-use.steps, use.bucket))[:MOST_BUCKETS],
        cells=sorted(report.cells, key=lambda cell: -cell.steps)[:MOST_CELLS],
        pictures={
            name: _inline(draw(report))
            for name, draw in (
                ("waste", figures.pareto_waste),
                ("coverage", figures.pareto_coverage),
                ("steps_map", figures.steps_map),
                ("hits_map", figures.hits_map),
                ("waste_map", figures.waste_map),
            )
        },
    )


def _inline(svg: bytes) -> str:
    """As a picture of its own: ids inside two figures do not meet, and each has one text for all readers."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg).decode()
