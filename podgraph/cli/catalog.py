"""``podgraph inspect`` and ``podgraph verify``."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from podgraph.cli.console import CATALOG, JSON, console, print_json, progress_bar, shape
from podgraph.shapes import Bucket, count_families


@click.command()
@CATALOG
@JSON
def inspect(file: Path, as_json: bool) -> None:
    """Show what a catalog holds. Touches no GPU."""
    from podgraph.catalog import store

    catalog = store.read(file)
    shared = {index: sum(r.template == index for r in catalog.records) for index in range(len(catalog.templates))}
    families = count_families(r.bucket for r in catalog.records)
    if as_json:
        print_json(
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
            r.spec, *shape(r.bucket), r.bucket.family, r.variant,
            str(r.template) if r.template >= 0 else "-",
            f"{r.replay_us:.1f}" if r.replay_us else "-", f"{r.max_error:.1e}",
        )  # fmt: skip
    console().print(table)
    click.echo(f"{len(catalog.records)} buckets: " + ", ".join(f"{n} {name}" for name, n in families.items()))
    for index, template in enumerate(catalog.templates):
        kernels = ", ".join(f"{n.function} on {n.grid[0]} CTAs" for n in template.nodes)
        users = f"shared by {shared[index]} buckets" if index in catalog.replayed else "plans each step"
        click.echo(f"graph {index}: {kernels}; {len(template.relocations)} relocations; {users}")


@click.command()
@CATALOG
@click.option("--static", "only_static", is_flag=True, help="Only what needs no replay, and so no GPU.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the batches and their data.")
@JSON
def verify(file: Path, only_static: bool, seed: int, as_json: bool) -> None:
    """Replay every bucket against a float32 reference, with everything poisoned that must not be touched.

    Before that, and with --static alone: images, parameters, relocations and regions are held against each other and
    against this version of podgraph.
    """
    from podgraph.catalog import static, store

    proven = static.check(store.read(file))
    if only_static:
        if as_json:
            print_json({"path": str(file), "proven": proven})
        else:
            click.echo("\n".join([*proven, f"{file}: holds together; nothing was replayed"]))
        return
    _verify_by_replay(file, proven, seed, as_json)


def _verify_by_replay(file: Path, proven: list[str], seed: int, as_json: bool) -> None:
    from podgraph import open as open_catalog
    from podgraph.verify import use_one_thread
    from podgraph.verify import verify as run_verify

    catalog = open_catalog(file)
    use_one_thread(catalog)
    total = len(catalog.content.records)
    results = []
    with progress_bar() as progress:
        for result in run_verify(catalog, seed=seed):
            results.append(result)
            progress("verify", len(results), total)
    failed = [r for r in results if r.problem]
    if as_json:
        buckets = [asdict(r) for r in results]
        print_json({"path": str(file), "proven": proven, "verified": total - len(failed), "buckets": buckets})
    else:
        for r in failed:
            shape = Bucket(r.batch, r.prefill_len, r.decode_count)
            click.echo(f"FAILED {r.spec} {shape}: {r.problem}")
        worst = max(r.error for r in results)
        click.echo(f"{file}: {total - len(failed)} of {total} buckets verified, worst relative error {worst:.1e}")
    if failed:
        sys.exit(1)


def _spec_line(attention: dict[str, Any]) -> str:
    return (
        f"{attention['num_qo_heads']}/{attention['num_kv_heads']} heads, head_dim {attention['head_dim']}, "
        f"page_size {attention['page_size']}, {attention['dtype']}, {attention['kv_layout']}"
    )
