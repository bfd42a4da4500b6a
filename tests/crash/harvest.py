"""Reads the results of all confirmed trees, and writes them into the books."""

from __future__ import annotations

import json
import os

import tree_tasks
from tree_tasks import runs_in, shape, write
from trees import named_in

from penstock import GroupError, ResultTimeout
from penstock.errors import JobError

PATIENCE_S = 60


def main() -> None:
    with open(os.environ["BOOKS"]) as lines:
        confirmed = [line for line in map(json.loads, lines) if line["event"] == "confirmed"]
    for line in confirmed:
        number = line["number"]
        try:
            value = tree_tasks.app.workflow(line["id"]).result(PATIENCE_S)
        except ResultTimeout:
            write("stuck", number=number)
        except GroupError as error:
            labels = sorted({label for each in error.failures for label in named_in(each.message)})
            write("failed", number=number, labels=labels, told=str(error), count=error.failed)
        except (JobError, tree_tasks.Boom) as error:
            write("failed", number=number, labels=named_in(str(error)), told=repr(error), count=1)
        else:
            write("result", number=number, value=shape(value), saw=runs_in(value))


if __name__ == "__main__":
    main()
