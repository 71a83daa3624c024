"""``podgraph compile`` and ``podgraph build``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from podgraph.cli.console import CONFIG, JSON, KERNELS, console, print_json, progress_bar


@click.command(name="compile")
@CONFIG
@click.option("--arch", default="sm_90a", show_default=True, help="GPU architecture: sm_80 or sm_90a.")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path, file_okay=False), help="Folder to fill.")
@JSON
def compile_(config: Path, arch: str, output: Path, as_json: bool) -> None:
    """Compile the kernels that a configuration can reach. Needs nvcc and FlashInfer's headers, no GPU."""
    from podgraph.build import compile_kernels
    from podgraph.config import load_config

    spec = load_config(config)
    with progress_bar() as progress:
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
        print_json({"arch": arch, "folder": str(output), "kernels": rows})
        return
    table = Table("kernel", "made for", "bytes", "registers", "spilled bytes")
    for row in rows:
        tiles = [row["defines"].get(f"PODGRAPH_TILE_{side}") for side in "PD"]
        shown = "" if tiles[0] is None else f"prefill {tiles[0]}, decode {tiles[1]}"
        if "PODGRAPH_KV_BLOCK" in row["defines"]:
            block, stages, slots = (row["defines"][f"PODGRAPH_{n}"] for n in ("KV_BLOCK", "STAGES", "DECODE_SLOTS"))
            shown = f"KV block {block}, {stages} stages, {slots} slots"
        table.add_row(row["file"], shown, f"{row['bytes']:,}", str(row["registers"]), str(row["spill_bytes"]))
    console().print(table)
    click.echo(f"{len(rows)} kernels for {arch} in {output}")


@click.command()
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
    with progress_bar() as progress:
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
        "templates": len(catalog.replayed),
        "images": len(catalog.images),
        "max_error": max(r.max_error for r in catalog.records),
        "reused": result.reused,
        "note": result.note,
        "failures": list(result.failures),
        "seconds": result.seconds,
    }
    if as_json:
        print_json(summary)
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
