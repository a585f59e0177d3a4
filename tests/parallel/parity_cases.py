"""Runs under mpirun: parity of many settings in one launch.

    mpirun -n 4 python parity_cases.py '[{"config": "examples/regression.toml", "overrides": [...]}, ...]'

A case may give `shares`, each replica's part of a batch.  Rank 0 prints one JSON line a case.
"""

import json
import sys
from dataclasses import asdict

from hpc_train.comm.connect import connect
from hpc_train.config import load
from hpc_train.tasks.find import load_task
from hpc_train.training.guard import guard
from hpc_train.training.layout import Layout
from hpc_train.training.parity import compare


def main(world):
    for case in json.loads(sys.argv[1]):
        settings = load(case["config"], case["overrides"])
        task = load_task(settings.task, settings.task_options)
        layout = Layout(settings, task, world)
        shares = tuple(case["shares"]) if case.get("shares") else None
        differences = compare(settings, task, world, layout, case.get("steps", 5), shares)
        if differences is not None:
            print(json.dumps([asdict(d) | {"holds": d.holds} for d in differences]), flush=True)
    world.close()


if __name__ == "__main__":
    # One rank of a launcher is a world too; what another backend must show goes the same way.
    world = connect(sys.argv[2] if len(sys.argv) > 2 else "mpi")
    guard(world, lambda: main(world))
