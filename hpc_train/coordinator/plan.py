"""What rank 0 decided for one step, as a record of fixed size.  PURE: neither torch nor MPI."""

import struct
from dataclasses import dataclass, replace

REASON_BYTES = 96  # of UTF-8; longer reasons are cut
TRIALS = 20  # ways to sum gradients that can be tried: 4 wires, 5 bucket sizes

_VERSION = 1
_HEAD = struct.Struct(f"<Bqqd??{REASON_BYTES}sB{TRIALS}d")
_SHARE = struct.Struct("<q")


@dataclass(frozen=True)
class Plan:
    """How one step is to be made.

    The plan of a step is also the memory of the policies: each gets the plan before, and every rank
    has it.  A policy that must remember more than stands here adds a field, so that whichever rank
    decides next can go on from it.
    """

    step: int  # from 1: after step 100 the model has had 100 updates
    batch_size: int  # samples, over all replicas
    shares: tuple[int, ...]  # samples of each replica in a full batch; they add up to batch_size
    learning_rate_scale: float = 1.0
    save: bool = False  # write a checkpoint after this step
    stop: bool = False  # this step is the last one
    reason: str = ""  # why it stops, for people
    trial: int = 0  # which way of summing gradients this step takes, of those that are tried
    trial_s: tuple[float, ...] = (0.0,) * TRIALS  # a step's time by each of them; 0: not known yet

    def following(self) -> "Plan":
        """The draft of the next step's plan: all the same, with nothing to save and no stop."""
        return replace(self, step=self.step + 1, save=False, stop=False, reason="")

    @staticmethod
    def num_bytes(num_replicas: int) -> int:
        """The length of a packed plan."""
        return _HEAD.size + num_replicas * _SHARE.size

    def pack(self) -> bytes:
        """The plan as bytes; their number depends on the number of replicas alone."""
        head = _HEAD.pack(
            _VERSION,
            self.step,
            self.batch_size,
            self.learning_rate_scale,
            self.save,
            self.stop,
            self.reason.encode()[:REASON_BYTES],
            self.trial,
            *self.trial_s,
        )
        return head + b"".join(map(_SHARE.pack, self.shares))

    @classmethod
    def unpack(cls, record: bytes) -> "Plan":
        """What `pack` made.  Raises ValueError when another version of the program made it."""
        num_replicas, left = divmod(len(record) - _HEAD.size, _SHARE.size)
        if num_replicas < 0 or left or record[0] != _VERSION:
            raise ValueError(
                f"a plan of {len(record)} bytes, version {record[:1].hex()}, where this program sends "
                f"version {_VERSION:02x}: the ranks run different versions of hpc_train"
            )
        _, step, batch_size, scale, save, stop, reason, trial, *trial_s = _HEAD.unpack_from(record)
        shares = tuple(share for (share,) in _SHARE.iter_unpack(record[_HEAD.size :]))
        # A reason that was cut may end inside a character: that one is dropped.
        words = reason.rstrip(b"\0").decode(errors="ignore")
        return cls(step, batch_size, shares, scale, save, stop, words, trial, tuple(trial_s))
