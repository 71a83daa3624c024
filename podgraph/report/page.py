"""The report as one HTML file that needs nothing else: no network, no script, no other file."""

from __future__ import annotations

from importlib import resources

from podgraph.report import figures
from podgraph.report.content import Report
from podgraph.workload.costs import Costs


def render(report: Report, costs: Costs) -> str:
    """The whole page; every name in it is escaped."""
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters["bytes"] = _bytes
    environment.filters["percent"] = lambda share: f"{100 * share:.2f} %"
    template = environment.from_string(resources.files("podgraph.report").joinpath("page.html.jinja").read_text())
    return template.render(
        report=report,
        now=report.now[report.eager],
        buckets=report.source.build.buckets,
        pareto=Markup(_inline(figures.pareto(report))),
        heat=Markup(_inline(figures.heat_maps(report, costs))),
    )


def _inline(svg: bytes) -> str:
    """The element alone; a figure's own description stands beside it."""
    text = svg.decode()
    return text[text.index("<svg") :].replace("<svg ", '<svg aria-hidden="true" ', 1)


def _bytes(count: int) -> str:
    if count < 1 << 20:
        return f"{count / (1 << 10):,.1f} KiB"
    return f"{count / (1 << 20):,.1f} MiB" if count < 1 << 30 else f"{count / (1 << 30):,.2f} GiB"
