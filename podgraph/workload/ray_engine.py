"""Shards over a Ray cluster: the only file that imports ray."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from podgraph.errors import ConfigError, TraceError

if TYPE_CHECKING:
    from podgraph.workload.shards import Piece, Result


def run_pieces(pieces: Sequence[Piece], progress: Callable[[int], None]) -> list[Result]:
    """Simulates each piece in a Ray task, on the cluster that is connected, that ``RAY_ADDRESS`` names, or a local one.

    Args:
        pieces: what to simulate; podgraph must be installed on the nodes.
        progress: called with the number of requests done.

    Returns:
        The results, in the order of the pieces.

    Raises:
        ConfigError: ray is not installed.
        TraceError: the cluster cannot be reached, or a task failed.
    """
    try:
        import ray
    except ImportError:
        raise ConfigError("engine ray: ray is not installed; pip install 'podgraph[ray]'") from None
    from podgraph.workload.shards import run_piece

    source = pieces[0][0].source
    connected = ray.is_initialized()
    try:
        if not connected:
            ray.init(log_to_driver=False, logging_level=logging.ERROR)
        task = ray.remote(run_piece)
        futures = [task.remote(piece) for piece in pieces]
        waiting, done = list(futures), 0
        while waiting:
            ready, waiting = ray.wait(waiting)
            for future in ready:
                done += len(pieces[futures.index(future)][0])
                progress(done)
        results: list[Result] = ray.get(futures)
    except (ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise TraceError(f"{source}: ray: {reason[-1]:.300}; look at the cluster with `ray status`") from error
    finally:
        if not connected:
            ray.shutdown()
    return results
