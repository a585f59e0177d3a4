"""What Horovod's users have in their environment: honoured where we mean the same by it, else named.  PURE.

    HOROVOD_FUSION_THRESHOLD=67108864    gradients.bucket_bytes: gradients that travel together, in bytes
    HOROVOD_AUTOTUNE=1                   gradients.tune

A setting that the file or an override gives counts more.  The other variables that Horovod 0.28 reads
when it runs mean nothing here, unless Horovod itself sums the gradients (comm.backend = "horovod").
"""

import json
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from hpc_train.errors import UserError

if TYPE_CHECKING:
    from hpc_train.comm.interface import ControlPlane
    from hpc_train.config import Settings

_BUCKET = "HOROVOD_FUSION_THRESHOLD"
_TUNE = "HOROVOD_AUTOTUNE"
_OTHERS = tuple(
    f"HOROVOD_{name}"
    for name in (
        "ADASUM_MPI_CHUNK_SIZE",
        "AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
        "AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
        "AUTOTUNE_LOG",
        "AUTOTUNE_STEPS_PER_SAMPLE",
        "AUTOTUNE_WARMUP_SAMPLES",
        "BATCH_D2D_MEMCOPIES",
        "CACHE_CAPACITY",
        "CCL_CACHE",
        "CONTROLLER",
        "CYCLE_TIME",
        "DISABLE_GROUP_FUSION",
        "DISABLE_NVTX_RANGES",
        "DYNAMIC_PROCESS_SETS",
        "ELASTIC",
        "ENABLE_ASYNC_COMPLETION",
        "GLOO_IFACE",
        "GLOO_TIMEOUT_SECONDS",
        "HIERARCHICAL_ALLGATHER",
        "HIERARCHICAL_ALLREDUCE",
        "LOG_HIDE_TIME",
        "LOG_LEVEL",
        "MPI_THREADS_DISABLE",
        "NUM_NCCL_STREAMS",
        "STALL_CHECK_DISABLE",
        "STALL_CHECK_TIME_SECONDS",
        "STALL_SHUTDOWN_TIME_SECONDS",
        "THREAD_AFFINITY",
        "TIMELINE",
        "TIMELINE_MARK_CYCLES",
        "TORUS_ALLREDUCE",
    )
)


def variables(environ: Mapping[str, str], control: "ControlPlane") -> dict[str, str]:
    """Horovod's variables, as rank 0 has them: mpirun may not hand them to other hosts.  Collective."""
    mine = {name: environ[name] for name in (_BUCKET, _TUNE, *_OTHERS) if name in environ}
    first: dict[str, str] = json.loads(control.all_gather(json.dumps(mine).encode())[0])
    return first


def bucket_bytes(found: Mapping[str, str]) -> int | None:
    """What HOROVOD_FUSION_THRESHOLD says; 0, no fusion, is the smallest bucket: one parameter each.

    Raises:
        UserError: it is no number of bytes.
    """
    if _BUCKET not in found:
        return None
    text = found[_BUCKET].strip()
    if not text.isdecimal():
        raise UserError(f"{_BUCKET}={text} is no number of bytes: write for instance {64 * 2**20} for 64 MiB")
    return max(1, int(text))


def honour(settings: "Settings", found: Mapping[str, str]) -> "Settings":
    """The settings with what the variables say, where neither the file nor an override says anything.

    Raises:
        UserError: a variable is no number of bytes, or does not go with the settings.
    """
    from hpc_train.config import changed  # a loop of one's own has no settings to load

    given = settings.gradients.model_fields_set
    said = {
        _BUCKET: ("bucket_bytes", bucket_bytes(found)),
        _TUNE: ("tune", _is_on(found.get(_TUNE, "")) or None),
    }
    for variable, (name, value) in said.items():
        if value is not None and name not in given:
            try:
                settings = changed(settings, {f"gradients.{name}": value})
            except UserError as error:
                raise UserError(f"{variable}={found[variable]} in the environment: {error}") from None
    return settings


def without_effect(found: Collection[str], backend: str, tunes: bool = True) -> str:
    """A warning that names the variables which do nothing; "" where there are none.

    Args:
        found: the variables.
        backend: as in `comm.backend`; Horovod reads its own.
        tunes: whether HOROVOD_AUTOTUNE means anything.
    """
    honoured = (_BUCKET, _TUNE) if tunes else (_BUCKET,)
    names = ", ".join(sorted(set(found) - set(honoured)))
    if backend == "horovod" or not names:
        return ""
    return f"{names}: no effect with comm.backend={backend}, as Horovod alone knows them"


def _is_on(text: str) -> bool:
    """As Horovod reads a flag: a number above zero."""
    return text.strip().isdecimal() and int(text) > 0
