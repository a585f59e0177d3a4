"""The machines that a run is planned for.  PURE: neither torch nor MPI."""

import math
from dataclasses import dataclass

from hpc_train.errors import UserError
from hpc_train.planning.units import read_bytes, read_rate, read_seconds


@dataclass(frozen=True)
class Cluster:
    """Hosts, and the network between them.

    Attributes:
        ranks: all of them.
        ranks_per_host: hosts are filled with so many, one after the other; the last one may have fewer.
        memory_bytes: what each rank has.
        bandwidth_host: bytes per second at which a rank and others of its host exchange.
        bandwidth: bytes per second of a host's line to the others, each way; its ranks share it.
        latency_host_s: of a message within a host.
        latency_s: of a message between hosts.
        burst_bytes: of a message between hosts that leave at once, if the line was idle: a token bucket.
        overhead_s: of a rank's own time for each message that it sends or receives; with the latencies and
            bandwidths this is the LogGP model (Alexandrov et al., SPAA 1995).
        overlap_cost: seconds of computing that each second of sums beside it costs, 0 if they need no core.
        speeds: of each host, against the one that the profile was measured on; none: all 1.
        host_of: the number of each rank's host, where they are not filled like that; `ranks_per_host` is then
            what the fullest one has.
    """

    ranks: int
    ranks_per_host: int
    memory_bytes: float = math.inf
    bandwidth_host: float = math.inf
    bandwidth: float = math.inf
    latency_host_s: float = 0.0
    latency_s: float = 0.0
    burst_bytes: float = 0.0
    overhead_s: float = 0.0
    overlap_cost: float = 0.0
    speeds: tuple[float, ...] = ()
    host_of: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Refuse numbers that are no cluster."""
        assert len(self.host_of) in (0, self.ranks)
        for noun in ("ranks", "ranks_per_host", "memory_bytes", "bandwidth_host", "bandwidth"):
            if not getattr(self, noun) > 0:
                raise UserError(f"a cluster with {noun} {getattr(self, noun)}: give a number above 0")
        for noun in ("latency_host_s", "latency_s", "burst_bytes", "overhead_s", "overlap_cost"):
            if getattr(self, noun) < 0:
                raise UserError(f"a cluster with {noun} {getattr(self, noun)}: give 0 or more")
        if self.speeds and (
            len(self.speeds) != self.hosts or not all(0 < speed < math.inf for speed in self.speeds)
        ):
            raise UserError(
                f"{len(self.speeds)} speed{'s' * (len(self.speeds) > 1)} {list(self.speeds)[:4]} for "
                f"{self.hosts} host{'s' * (self.hosts > 1)} of {self.ranks_per_host} ranks: "
                "give a number above 0 for each host"
            )

    @classmethod
    def read(
        cls,
        ranks: int,
        ranks_per_host: int | None = None,
        memory: str | None = None,
        bandwidth_host: str | None = None,
        bandwidth: str | None = None,
        latency: str | None = None,
        latency_host: str | None = None,
        overhead: str | None = None,
        speeds: str | None = None,
    ) -> "Cluster":
        """The cluster that options of `hpc-train plan` describe; what is left out has no limit or latency.

        Raises:
            UserError: an option is not what it should be.
        """
        return cls(
            ranks,
            ranks_per_host or ranks,
            read_bytes("--memory", memory) if memory else math.inf,
            read_rate("--bandwidth-host", bandwidth_host) if bandwidth_host else math.inf,
            read_rate("--bandwidth", bandwidth) if bandwidth else math.inf,
            read_seconds("--latency-host", latency_host) if latency_host else 0.0,
            read_seconds("--latency", latency) if latency else 0.0,
            overhead_s=read_seconds("--overhead", overhead) if overhead else 0.0,
            speeds=_read_speeds(speeds) if speeds else (),
        )

    @property
    def hosts(self) -> int:
        """How many there are."""
        return max(self.host_of) + 1 if self.host_of else -(-self.ranks // self.ranks_per_host)

    def speed_of(self, host: int) -> float:
        """Against the one that the profile was measured on."""
        return self.speeds[host] if self.speeds else 1.0


def _read_speeds(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(speed) for speed in text.split(","))
    except ValueError:
        raise UserError(f"--speeds {text}: no numbers: write for instance 1,1,0.5") from None
