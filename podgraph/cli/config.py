"""``podgraph buckets`` and ``podgraph config``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from podgraph.cli.console import CONFIG, JSON, plain_table, print_json, shape
from podgraph.shapes import count_families


@click.command()
@CONFIG
@JSON
def buckets(config: Path, as_json: bool) -> None:
    """List the buckets that a configuration enumerates, largest first."""
    from podgraph.config import load_config

    spec = load_config(config)
    families = count_families(spec.buckets)
    if as_json:
        print_json({"buckets": [asdict(b) for b in spec.buckets], "families": families, "dropped": dict(spec.dropped)})
        return
    header = ("batch", "prefill_len", "decode_count", "family")
    click.echo(plain_table(header, [(*shape(bucket), bucket.family) for bucket in spec.buckets]))
    click.echo(f"{len(spec.buckets)} buckets: " + ", ".join(f"{n} {name}" for name, n in families.items()))
    for reason, count in spec.dropped.items():
        click.echo(f"dropped {count} combinations: {reason}")


@click.command(name="config")
@click.option(
    "--for-model", "model", required=True, type=click.Path(path_type=Path), help="A model's config.json (Hugging Face)."
)
@click.option("--tp", type=click.IntRange(1), default=1, show_default=True, help="GPUs that share each layer's heads.")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="File to write.  [default: standard output]"
)
@JSON
def config(model: Path, tp: int, output: Path | None, as_json: bool) -> None:
    """Write a build configuration for a model: its heads, dtype, scale, windows, and buckets to start from."""
    from podgraph import models, whole_file
    from podgraph.errors import ConfigError

    text = models.config_from_file(model, tp)
    if output is not None:
        whole_file.write(output, text.encode(), ConfigError)
    if as_json:
        print_json({"path": None if output is None else str(output), "config": text})
    elif output is None:
        click.echo(text, nl=False)
    else:
        click.echo(f"{output}: written; list its buckets with `podgraph buckets --config {output}`")
