"""What every test may import beside the library: the modules of this folder, and podgraph itself from a checkout."""

from __future__ import annotations

import os
import sys
from pathlib import Path

TESTS = Path(__file__).parent

for folder in (TESTS, TESTS.parent):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))

# The tensors of these tests are tiny: several threads would only wait for one another. Child processes inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
