"""The ``penstock`` command: finds the executable of that name and replaces this process with it."""

from __future__ import annotations

# Every command waits for this module, so it imports next to nothing: not even pathlib.
import os
import sys


def main() -> None:
    program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_bin", "penstock")
    # The program starts workers with the interpreter that called it, so they see the same packages.
    environment = {**os.environ, "PENSTOCK_PYTHON": sys.executable}
    try:
        os.execve(program, ["penstock", *sys.argv[1:]], environment)
    except OSError as error:
        sys.exit(f"penstock: cannot run {program}: {error.strerror}; reinstall penstock, or `make build` in a checkout")


if __name__ == "__main__":
    main()
