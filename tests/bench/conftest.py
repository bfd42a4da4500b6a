"""Let the tests import the scripts of bench/, which are no package, as the scripts import each other."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
