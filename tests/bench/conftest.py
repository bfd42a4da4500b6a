"""Lets the tests import the scripts of bench/, which isn't a package, the way the scripts import each other."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
