"""One thing to reach, and what was measured.  PURE."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Bar:
    """One thing to reach.

    Attributes:
        what, bar: where, and how much, for people.
        value: measured, at the worst size; None: not measured.
        bound: `value` should be at most that, or at least.
        best_possible: what `value` would be if memory and links were the only limit.
        remark: which size the value is of, what is missing.
    """

    what: str
    bar: str
    value: float | None
    bound: float
    at_most: bool
    best_possible: float | None = None
    remark: str = ""

    @property
    def met(self) -> bool | None:
        """None: not measured."""
        if self.value is None:
            return None
        return self.value <= self.bound if self.at_most else self.value >= self.bound

    @property
    def missed_by(self) -> float:
        """The part of the bound by which it is missed; 0 where it is met."""
        if self.value is None or self.met:
            return 0.0
        return abs(self.value - self.bound) / abs(self.bound)

    @property
    def why(self) -> str:
        """What the data say about a bar that is missed."""
        if self.met is not False or self.best_possible is None:
            return ""
        reachable = self.best_possible <= self.bound if self.at_most else self.best_possible >= self.bound
        if not reachable:
            return f"nobody could: at the limit of memory or links it would be {self.best_possible:.2f}"
        return f"the limit of memory or links would allow {self.best_possible:.2f}"
