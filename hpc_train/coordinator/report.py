"""What a rank measured in one step, as a record of fixed size.  PURE: neither torch nor MPI."""

import struct
from dataclasses import astuple, dataclass

_VERSION = 1
_LAYOUT = struct.Struct("<Biqqdddd?B")


@dataclass(frozen=True)
class Report:
    """One rank's account of a step; rank 0 gets one from every rank.

    `compute_s`, `wait_s` and `comm_s` are the stopwatch's; `grad_norm` is the global one, NaN where
    gradients are not `finite`.  `signal` is the number of a signal that asks for an end, or 0.
    """

    rank: int
    step: int
    samples: int
    compute_s: float = 0.0
    wait_s: float = 0.0
    comm_s: float = 0.0
    grad_norm: float = 0.0
    finite: bool = True
    signal: int = 0

    def pack(self) -> bytes:
        """The report as bytes, of the same length for all ranks."""
        return _LAYOUT.pack(_VERSION, *astuple(self))

    @classmethod
    def unpack(cls, record: bytes) -> "Report":
        """What `pack` made.  Raises ValueError when another version of the program made it."""
        if len(record) != _LAYOUT.size or record[0] != _VERSION:
            raise ValueError(
                f"a report of {len(record)} bytes, version {record[:1].hex()}, where this program sends "
                f"{_LAYOUT.size} bytes, version {_VERSION:02x}: the ranks run different versions of hpc_train"
            )
        _, *values = _LAYOUT.unpack(record)
        return cls(*values)
