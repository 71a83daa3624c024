"""Options that `tune` and `report` share: the steps to look at, the engine that makes them, and what they cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from podgraph.cli.trace import BAD_ROWS, COLUMNS

if TYPE_CHECKING:
    from podgraph.config import BuildSpec
    from podgraph.workload.shards import Job

F = TypeVar("F", bound=Callable[..., Any])

TRACES = click.option(
    "--trace",
    "traces",
    required=True,
    multiple=True,
    type=click.Path(path_type=Path),
    help="Request log, step log or histogram; may be given several times.",
)
COST_OPTIONS = (
    click.option(
        "--device", default="h200", show_default=True, help="Profile of the GPU, by its name or the path of a file."
    ),
    click.option(
        "--costs",
        type=click.Path(path_type=Path),
        help="CSV of what buckets cost: rows,us or batch,prefill_len,decode_count,us.",
    ),
    click.option(
        "--eager",
        type=click.Choice(["penalty", "hidden"]),
        default="penalty",
        show_default=True,
        help="A step without a graph: the host's time on top of the GPU's, or the longer of the two.",
    ),
)
ENGINE_OPTIONS = (
    click.option(
        "--max-pages", type=click.IntRange(1), help="KV pages of the engine.  [default: those of the workspace]"
    ),
    click.option(
        "--policy",
        type=click.Choice(["decode-first", "prefill-first"]),
        default="decode-first",
        show_default=True,
        help="Whose rows a step takes first.",
    ),
    click.option("--chunk", type=click.IntRange(1), help="Rows of one request's prefill in one step at most."),
    click.option("--max-prefills", type=click.IntRange(1), help="Requests that prefill in one step at most."),
    click.option("--rate", type=click.FloatRange(0, min_open=True), help="Requests per second that arrive."),
    click.option(
        "--load", type=click.FloatRange(0, min_open=True), help="The same, as a share of what the engine sustains."
    ),
    click.option("--seed", type=int, default=0, show_default=True, help="Of arrivals, where the trace has none."),
    COLUMNS,
    BAD_ROWS,
)


def engine_options(command: F) -> F:
    """Adds them; the command gets what `job_of` takes as keywords, beside ``columns`` and ``bad_rows``."""
    return _with(ENGINE_OPTIONS, command)


def cost_options(command: F) -> F:
    """Adds ``device``, ``costs`` and ``eager``."""
    return _with(COST_OPTIONS, command)


def keep_inputs(outputs: Iterable[Path | None], inputs: Iterable[Path | None]) -> None:
    """Refuses to write over what is read.

    Raises:
        ConfigError: an output is one of the inputs.
    """
    from podgraph.errors import ConfigError

    read = [path for path in inputs if path is not None and path.exists()]
    for output in outputs:
        if output is not None and output.exists() and any(output.samefile(path) for path in read):
            raise ConfigError(f"{output}: got the same file to read and to write; name another one to write")


def _with(options: tuple[Callable[[F], F], ...], command: F) -> F:
    for option in reversed(options):
        command = option(command)
    return command


def job_of(
    build: BuildSpec, device: str, config: Path | None, token_budget: int, max_running: int, engine: dict[str, Any]
) -> Job:
    """How a request log is simulated: on the profile where the model is known, else with one time for every step."""
    from podgraph.workload.modelled_step import modelled_step
    from podgraph.workload.scheduler import SchedulerConfig, StepCost
    from podgraph.workload.shards import Job
    from podgraph.workload.simulation import DEFAULT_STEP_US

    step_us: StepCost | float = DEFAULT_STEP_US
    name = f"{DEFAULT_STEP_US:g} us a step"
    if build.model is not None and config is not None:
        step_us, name = modelled_step(device, config)
    limits = SchedulerConfig(
        token_budget,
        max_running,
        engine["max_pages"] or build.workspace.max_pages,
        min(spec.page_size for spec in build.specs.values()),
        engine["policy"],
        engine["chunk"],
        engine["max_prefills"],
    )
    return Job(limits, step_us, name, engine["rate"], engine["load"], engine["seed"])
