"""The harness is a folder of scripts, not a package: its tests import them as the scripts do each other."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
