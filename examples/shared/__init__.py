"""What the examples share. Processes, servers and peers are started by what the benchmark has for that."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "bench"))
