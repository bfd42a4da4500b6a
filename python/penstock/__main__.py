"""``python -m penstock``: the ``penstock`` command, for where that is not on the PATH."""

from penstock._cli import main

if __name__ == "__main__":
    main()
