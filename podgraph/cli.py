"""The command line: parse, one library call, print. Exit 0 success, 1 failure, 2 usage."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import podgraph
from podgraph.errors import PodgraphError
from podgraph.shapes import Bucket, count_families

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


@main.command()
@CONFIG
@JSON
def buckets(config: Path, as_json: bool) -> None:
    """List the buckets that a configuration enumerates, largest first."""
    from podgraph.config import load_config

    spec = load_config(config)
    families = count_families(spec.buckets)
    if as_json:
        _print_json({"buckets": [asdict(b) for b in spec.buckets], "families": families, "dropped": dict(spec.dropped)})
        return
    header = ("batch", "prefill_len", "decode_count", "family")
    click.echo(_rows(header, [(*_shape(bucket), bucket.family) for bucket in spec.buckets]))
    click.echo(f"{len(spec.buckets)} buckets: " + ", ".join(f"{n} {name}" for name, n in families.items()))
    for reason, count in spec.dropped.items():
        click.echo(f"dropped {count} combinations: {reason}")


@main.command(name="config")
@click.option(
    "--for-model", "model", required=True, type=click.Path(path_type=Path), help="A model's config.json (Hugging Face)."
)
@click.option("--tp", type=click.IntRange(1), default=1, show_default=True, help="GPUs that share each layer's heads.")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="File to write.  [default: standard output]"
)
@JSON
def config_(model: Path, tp: int, output: Path | None, as_json: bool) -> None:
    """Write a build configuration for a model: its heads, dtype, scale, windows, and buckets to start from."""
    from podgraph import models

    text = models.config_from_file(model, tp)
    if output is not None:
        models.save(text, output)
    if as_json:
        _print_json({"path": None if output is None else str(output), "config": text})
    elif output is None:
        click.echo(text, nl=False)
    else:
        click.echo(f"{output}: written; list its buckets with `podgraph buckets --config {output}`")


@main.command(name="compile")
@CONFIG
@click.option("--arch", default="sm_90a", show_default=True, help="GPU architecture: sm_80 or sm_90a.")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path, file_okay=False), help="Folder to fill.")
@JSON
def compile_(config: Path, arch: str, output: Path, as_json: bool) -> None:
    """Compile the kernels that a configuration can reach. Needs nvcc and FlashInfer's headers, no GPU."""
    from podgraph.build import compile_kernels
    from podgraph.config import load_config

    spec = load_config(config)
    with _progress() as progress:
        compiled = compile_kernels(spec, arch, output, progress)
    rows: list[dict[str, Any]] = [
        {
            "file": source.file,
            "defines": dict(source.defines),
            "bytes": len(c.cubin),
            "registers": c.registers,
            "spill_bytes": c.spill_bytes,
        }
        for source, c in compiled.items()
    ]
    if as_json:
        _print_json({"arch": arch, "folder": str(output), "kernels": rows})
        return
    table = Table("kernel", "tiles", "bytes", "registers", "spilled bytes")
    for row in rows:
        tiles = [row["defines"].get(f"PODGRAPH_TILE_{side}") for side in "PD"]
        shown = "" if tiles[0] is None else f"prefill {tiles[0]}, decode {tiles[1]}"
        table.add_row(row["file"], shown, f"{row['bytes']:,}", str(row["registers"]), str(row["spill_bytes"]))
    _out().print(table)
    click.echo(f"{len(rows)} kernels for {arch} in {output}")


@main.command()
@CONFIG
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Catalog to write.  [default: NAME.podcat]"
)
@KERNELS
@click.option("--backend", type=click.Choice(["auto", "cuda", "cpu"]), help="Instead of the configuration's.")
@click.option("--device", type=click.IntRange(0), default=0, show_default=True, help="GPU to build on.")
@click.option("--keep-going", is_flag=True, help="Write the buckets that verify even where others fail; exit 1 then.")
@click.option("--fresh", is_flag=True, help="Verify every bucket, also those that an earlier build has verified.")
@click.option("--compare-flashinfer", is_flag=True, help="Also hold each error against twice FlashInfer's own.")
@JSON
def build(
    config: Path,
    output: Path | None,
    kernels: Path,
    backend: str | None,
    device: int,
    keep_going: bool,
    fresh: bool,
    compare_flashinfer: bool,
    as_json: bool,
) -> None:
    """Build a catalog: compile, capture, prove, verify in a fresh process, write."""
    from podgraph.build import build as run_build
    from podgraph.config import load_config

    spec = load_config(config)
    with _progress() as progress:
        result = run_build(
            spec,
            output or Path(f"{config.stem}.podcat"),
            kernels=kernels,
            backend=backend,
            device=device,
            keep_going=keep_going,
            fresh=fresh,
            compare_flashinfer=compare_flashinfer,
            progress=progress,
        )
    catalog = result.catalog
    summary = {
        "path": str(result.path),
        "backend": result.backend,
        "reason": result.reason,
        "catalog_bytes": result.catalog_bytes,
        "buckets": len(catalog.records),
        "templates": len(catalog.templates),
        "images": len(catalog.images),
        "max_error": max(r.max_error for r in catalog.records),
        "reused": result.reused,
        "note": result.note,
        "failures": list(result.failures),
        "seconds": result.seconds,
    }
    if as_json:
        _print_json(summary)
    else:
        click.echo(f"backend {result.backend}: {result.reason}")
        if result.note:
            click.echo(result.note)
        if result.reused:
            click.echo(f"{result.reused} buckets are unchanged and were verified before (--fresh does them again)")
        click.echo(
            f"{result.path}: {summary['buckets']} buckets in {summary['templates']} graphs, "
            f"{result.catalog_bytes:,} bytes, every bucket verified (worst relative error {summary['max_error']:.1e})"
        )
        for failure in result.failures:
            click.echo(f"left out: {failure}", err=True)
    if result.failures:
        sys.exit(1)


@main.command()
@CATALOG
@JSON
def inspect(file: Path, as_json: bool) -> None:
    """Show what a catalog holds. Touches no GPU."""
    from podgraph.catalog import store

    catalog = store.read(file)
    shared = {index: sum(r.template == index for r in catalog.records) for index in range(len(catalog.templates))}
    families = count_families(r.bucket for r in catalog.records)
    if as_json:
        _print_json(
            {
                "path": str(file),
                "catalog_bytes": file.stat().st_size,
                "fingerprint": asdict(catalog.fingerprint),
                "built_with": catalog.built_with,
                "specs": {
                    name: {"attention": e.attention.to_dict(), "regions": {r.name: r.size for r in e.regions}}
                    for name, e in catalog.specs.items()
                },
                "max_pages": catalog.max_pages,
                "max_kv_len": catalog.max_kv_len,
                "families": families,
                "templates": [
                    {
                        "kernels": [f"{n.function} x {n.grid[0]}" for n in t.nodes],
                        "relocations": len(t.relocations),
                        "records": shared[i],
                    }
                    for i, t in enumerate(catalog.templates)
                ],
                "images": {digest: len(data) for digest, data in catalog.images.items()},
                "records": [
                    {
                        **asdict(r.bucket),
                        "spec": r.spec,
                        "variant": r.variant,
                        "template": r.template,
                        "replay_us": r.replay_us,
                        "max_error": r.max_error,
                    }
                    for r in catalog.records
                ],
            }
        )
        return
    f = catalog.fingerprint
    where = f"compute capability {f.compute_capability}, {f.sm_count} SMs, driver >= {f.driver_min}"
    click.echo(f"{file}: {file.stat().st_size:,} bytes, backend {f.backend}" + (f" ({where})" if f.sm_count else ""))
    for name, entry in catalog.specs.items():
        owned = sum(r.size for r in entry.regions) + 4 * catalog.max_pages
        memory = f"; {owned:,} bytes of device memory for its regions when bound" if f.backend == "cuda" else ""
        click.echo(f"spec {name}: {_spec_line(entry.attention.to_dict())}{memory}")
    table = Table("spec", "batch", "prefill_len", "decode_count", "family", "variant", "graph", "replay us", "error")
    for r in catalog.records:
        table.add_row(
            r.spec, *_shape(r.bucket), r.bucket.family, r.variant,
            str(r.template) if r.template >= 0 else "-",
            f"{r.replay_us:.1f}" if r.replay_us else "-", f"{r.max_error:.1e}",
        )  # fmt: skip
    _out().print(table)
    click.echo(f"{len(catalog.records)} buckets: " + ", ".join(f"{n} {name}" for name, n in families.items()))
    for index, template in enumerate(catalog.templates):
        kernels = ", ".join(f"{n.function} on {n.grid[0]} CTAs" for n in template.nodes)
        click.echo(
            f"graph {index}: {kernels}; {len(template.relocations)} relocations; shared by {shared[index]} buckets"
        )


@main.command()
@CATALOG
@click.option("--seed", type=int, default=0, show_default=True, help="Of the batches and their data.")
@JSON
def verify(file: Path, seed: int, as_json: bool) -> None:
    """Replay every bucket against a float32 reference, with everything poisoned that must not be touched."""
    from podgraph import open as open_catalog
    from podgraph.verify import use_one_thread
    from podgraph.verify import verify as run_verify

    catalog = open_catalog(file)
    use_one_thread(catalog)
    total = len(catalog.content.records)
    results = []
    with _progress() as progress:
        for result in run_verify(catalog, seed=seed):
            results.append(result)
            progress("verify", len(results), total)
    failed = [r for r in results if r.problem]
    if as_json:
        _print_json({"path": str(file), "verified": total - len(failed), "buckets": [asdict(r) for r in results]})
    else:
        for r in failed:
            shape = Bucket(r.batch, r.prefill_len, r.decode_count)
            click.echo(f"FAILED {r.spec} {shape}: {r.problem}")
        worst = max(r.error for r in results)
        click.echo(f"{file}: {total - len(failed)} of {total} buckets verified, worst relative error {worst:.1e}")
    if failed:
        sys.exit(1)


@main.command()
@CATALOG
@click.option("--trace", required=True, type=click.Path(path_type=Path), help="Request trace, CSV or JSONL.")
@click.option("--limit", type=click.IntRange(1), default=200, show_default=True, help="Steps to replay.")
@click.option(
    "--rate", type=click.FloatRange(0, min_open=True), help="Requests per second, instead of the trace's own."
)
@click.option("--spec", help="Specification, where the catalog holds several.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the data and the order within a step.")
@JSON
def replay(file: Path, trace: Path, limit: int, rate: float | None, spec: str | None, seed: int, as_json: bool) -> None:
    """Schedule a request trace, replay its steps, and compare each with a float32 reference."""
    from podgraph import open as open_catalog
    from podgraph.replay import describe, replay_trace
    from podgraph.verify import use_one_thread
    from podgraph.workload.traces import at_rate, read_trace

    catalog = open_catalog(file)
    use_one_thread(catalog)
    requests = read_trace(trace)
    if rate is not None:
        requests = at_rate(requests, rate)
    with _progress() as progress:
        report = replay_trace(
            catalog, requests, spec=spec, limit=limit, seed=seed, progress=lambda n: progress("replay", n, limit)
        )
    facts = describe(report)
    if as_json:
        _print_json({"path": str(file), "trace": str(trace), "skipped_rows": requests.skipped, **facts})
    else:
        _print_replay(facts)
    if report.failures:
        sys.exit(1)


def _print_replay(facts: dict[str, Any]) -> None:
    table = Table("bucket", "replays", "share")
    for bucket, count in facts["replays"].items():
        table.add_row(bucket, str(count), f"{count / facts['replays_total']:.1%}")
    _out().print(table)
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


class _Report(Protocol):
    def __call__(self, stage: str, done: int, total: int) -> None: ...


@contextmanager
def _progress() -> Iterator[_Report]:
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


def _out() -> Console:
    # a table that is read by a program or a log must not be folded to 80 columns
    console = Console()
    return console if console.is_terminal else Console(width=160)


def _rows(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
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


def _shape(bucket: Bucket) -> tuple[str, str, str]:
    return str(bucket.batch), str(bucket.prefill_len), str(bucket.decode_count)


def _spec_line(attention: dict[str, Any]) -> str:
    return (
        f"{attention['num_qo_heads']}/{attention['num_kv_heads']} heads, head_dim {attention['head_dim']}, "
        f"page_size {attention['page_size']}, {attention['dtype']}, {attention['kv_layout']}"
    )


def _print_json(document: Any) -> None:
    click.echo(json.dumps(document, indent=2))
