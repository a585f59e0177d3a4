"""Runs checks on every rank: mpirun -n 4 python launch.py BACKEND [NAME ...]

Each check has a world of its own, so that worlds follow each other in one process.  Rank 0 says
`passed NAME`; a rank that fails shows its traceback and ends all ranks.
"""

import sys
import traceback

import cases
import mpi_cases
import torch

from hpc_train.comm.connect import connect


def main() -> None:
    torch.set_num_threads(1)
    backend, *names = sys.argv[1:]
    known = cases.checks() | (mpi_cases.checks() if backend == "mpi" else {})
    for name in names:
        world = connect(backend)
        try:
            known[name](world)
        except BaseException:  # noqa: BLE001  shown here, and the job ends
            print(f"rank {world.rank} of {world.size} in {name}", file=sys.stderr)
            traceback.print_exc()
            world.control.abort(1)
        world.close()
        if world.rank == 0:
            print(f"passed {name}", flush=True)


if __name__ == "__main__":
    main()
