"""``python -m penstock``: runs the ``penstock`` command where it is not on the PATH."""

from penstock._cli import main

if __name__ == "__main__":
    main()
