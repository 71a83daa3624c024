"""Whether a machine can replay a catalog: every field compared by name."""

from __future__ import annotations

from podgraph.catalog.model import Fingerprint
from podgraph.errors import FingerprintMismatch

_REBUILD = "rebuild the catalog on this GPU"


def compare(built: Fingerprint, offered: Fingerprint) -> None:
    """Returns where ``offered`` can replay what was built for ``built``.

    A ``cpu`` catalog replays anywhere. ``compute_capability`` and ``sm_count`` must be equal (the images and the grids
    were made for them); ``offered.driver_min``, the version of the driver at hand, must be at least the catalog's.

    Raises:
        FingerprintMismatch: naming each differing field, both its values, and the next step.
    """
    if built.backend == "cpu":
        return
    if offered.backend != built.backend:
        # The other fields say nothing where there is no GPU.
        raise FingerprintMismatch(
            f"backend: the catalog was built for {built.backend}, this machine offers {offered.backend or 'none'}; "
            f"run on a GPU of compute capability {built.compute_capability}, or rebuild the catalog on this machine"
        )
    differences: list[str] = []
    steps: list[str] = []
    for name in ("compute_capability", "sm_count"):
        wanted, got = getattr(built, name), getattr(offered, name)
        if got != wanted:
            differences.append(f"{name}: the catalog was built for {wanted}, this machine offers {got}")
            steps = [_REBUILD]
    if offered.driver_min < built.driver_min:
        differences.append(
            f"driver_min: the catalog needs {_driver(built.driver_min)} or newer, "
            f"this machine offers {_driver(offered.driver_min)}"
        )
        # A rebuild uses the driver at hand, so that a new GPU needs no second step.
        steps = steps or ["update the driver", _REBUILD]
    if differences:
        raise FingerprintMismatch(f"{'; '.join(differences)}; {' or '.join(steps)}")


def _driver(version: int) -> str:
    return f"{version} (CUDA {version // 1000}.{version % 1000 // 10})"
