"""In which order each stage works on the micro-batches.  PURE: neither torch nor MPI.

4 micro-batches through 3 stages, backward as long as forward (draw(order, 1, 1) makes these):

    gpipe                                            1f1b
    stage 0  F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3     stage 0  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
    stage 1  .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .      stage 1  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
    stage 2  .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .      stage 2  .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .

Both take m + p - 1 forwards and backwards for m micro-batches and p stages, so that a share of
(p - 1) / (m + p - 1) of the time is idle. gpipe keeps the activations of all m micro-batches until
their backward, 1f1b those of at most p - stage. With 0 micro-batches a stage has nothing to do.
"""

from collections.abc import Callable

from hpc_train.pipeline.actions import Action, Kind, Order


def forward_only(stages: int, micro_batches: int) -> Order:
    """Forwards alone, as evaluation needs them."""
    forwards = _all(Kind.F, micro_batches)
    return [list(forwards) for _ in range(stages)]


def gpipe(stages: int, micro_batches: int) -> Order:
    """All forwards, then all backwards (Huang et al., GPipe, 2019).

    Backwards run first in, first out: the gradient that comes first belongs to the micro-batch
    that the last stage saw first.
    """
    actions = _all(Kind.F, micro_batches) + _all(Kind.B, micro_batches)
    return [list(actions) for _ in range(stages)]


def one_f_one_b(stages: int, micro_batches: int) -> Order:
    """Backward as early as it can be (Narayanan et al., PipeDream-Flush, 2021).

    A stage runs ahead by one forward for each stage after it, then takes turns: forward, backward.
    """
    forwards, backwards = _all(Kind.F, micro_batches), _all(Kind.B, micro_batches)
    order = []
    for stage in range(stages):
        ahead = min(stages - 1 - stage, micro_batches)
        turns = [action for pair in zip(forwards[ahead:], backwards, strict=False) for action in pair]
        order.append(forwards[:ahead] + turns + backwards[micro_batches - ahead :])
    return order


_BY_NAME: dict[str, Callable[[int, int], Order]] = {"gpipe": gpipe, "1f1b": one_f_one_b}


def make(name: str, stages: int, micro_batches: int) -> Order:
    """The order of the schedule called `name`: "gpipe" or "1f1b".

    Raises:
        ValueError: there is no such schedule.
    """
    if name not in _BY_NAME:
        raise ValueError(f"no schedule {name!r}: known are {', '.join(_BY_NAME)}")
    return _BY_NAME[name](stages, micro_batches)


def _all(kind: Kind, micro_batches: int) -> list[Action]:
    return [Action(kind, micro_batch) for micro_batch in range(micro_batches)]
