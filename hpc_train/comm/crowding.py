"""Do the threads that wait take cores from those that compute?  PURE: asked before MPI starts, too."""

import os

THREADS_A_RANK = 2  # one computes; beside it one may wait for a gradient sum


def crowded(local_size: int) -> bool:
    """True when the ranks of this host, `local_size`, have fewer cores than threads at work.

    A rank that is bound to some cores sees those only, and may then be taken for crowded wrongly; what
    that costs, a yield in a wait, is far less than what a spinning wait takes from a computing thread:
    half a core (2 ranks on 2 cores: 122 ms of matmuls took 179 ms, and 122 ms with yielding waits).
    """
    return THREADS_A_RANK * local_size > len(os.sched_getaffinity(0))
