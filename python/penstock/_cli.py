"""The ``penstock`` command: this only finds the program of that name and becomes it."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> None:
    program = Path(__file__).with_name("_bin") / "penstock"
    # The program starts workers with the interpreter, and so the packages, that it was called from.
    environment = {**os.environ, "PENSTOCK_PYTHON": sys.executable}
    try:
        os.execve(program, ["penstock", *sys.argv[1:]], environment)
    except OSError as error:
        sys.exit(f"penstock: cannot run {program}: {error.strerror}; reinstall penstock, or `make build` in a checkout")


if __name__ == "__main__":
    main()
