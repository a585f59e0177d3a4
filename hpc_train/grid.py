"""Which rank holds which stage of which replica.  PURE: neither torch nor MPI.

With 2 replicas of 3 stages, `fastest="stage"` (left) keeps a replica's stages on neighbouring
ranks, `fastest="replica"` (right) keeps the ranks that sum gradients together:

              stage 0  1  2                 stage 0  1  2
    replica 0       0  1  2       replica 0       0  2  4
    replica 1       3  4  5       replica 1       1  3  5
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from hpc_train.errors import UserError

Fastest = Literal["stage", "replica"]


class Place(NamedTuple):
    """A cell of the grid."""

    replica: int
    stage: int


@dataclass(frozen=True)
class Grid:
    """`replicas` × `stages` ranks; `fastest` names the coordinate that neighbouring ranks differ in."""

    replicas: int
    stages: int
    fastest: Fastest = "stage"

    @classmethod
    def for_ranks(cls, num_ranks: int, stages: int, fastest: Fastest = "stage") -> "Grid":
        """The grid of `num_ranks` ranks with `stages` stages.

        Raises:
            UserError: the stages do not divide the ranks.
        """
        replicas, left = divmod(num_ranks, stages)
        if replicas == 0 or left:
            below, above = replicas * stages, (replicas + 1) * stages
            counts = f"-n {above}" if below == 0 else f"-n {below} or -n {above}"
            divisors = [d for d in range(1, num_ranks + 1) if num_ranks % d == 0]
            nearest = min(divisors, key=lambda d: (abs(d - stages), d))
            raise UserError(
                f"{stages} stages cannot share {num_ranks} rank{'s' * (num_ranks > 1)} evenly: "
                f"start with {counts}, or set grid.stages={nearest}"
            )
        return cls(replicas, stages, fastest)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.replicas * self.stages

    def place(self, rank: int) -> Place:
        """Where a rank stands."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is not in a grid of {self.size}")
        if self.fastest == "stage":
            return Place(*divmod(rank, self.stages))
        stage, replica = divmod(rank, self.replicas)
        return Place(replica, stage)

    def rank(self, replica: int, stage: int) -> int:
        """The rank at a place."""
        if not (0 <= replica < self.replicas and 0 <= stage < self.stages):
            raise ValueError(f"replica {replica}, stage {stage} is not in {self.replicas} x {self.stages}")
        if self.fastest == "stage":
            return replica * self.stages + stage
        return stage * self.replicas + replica

    def replicas_of(self, stage: int) -> list[int]:
        """The ranks that hold `stage`, by replica: those that sum gradients together."""
        return [self.rank(replica, stage) for replica in range(self.replicas)]

    def stages_of(self, replica: int) -> list[int]:
        """The ranks of `replica`, by stage: those that pass activations on."""
        return [self.rank(replica, stage) for stage in range(self.stages)]
