"""Code shared by the examples. The benchmark's helpers start processes, servers and peers."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "bench"))
