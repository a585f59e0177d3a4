"""In which order each stage works on the micro-batches.  PURE: neither torch nor MPI.

For p stages and m micro-batches, m at least p (zb-v: 2 p - 1); F, I, W are a stage's seconds of a micro-batch
and B = I + W. What is kept is counted in micro-batches' activations of a whole stage:

    name         chunks a stage  idle time of a stage                 keeps at most
    gpipe        1               (p - 1) (F + B)                      m
    1f1b         1               (p - 1) (F + B)                      p - stage
    interleaved  v, 2 or more    (p - 1) (F + B) / v                  p + (p - 1) / v, where p divides m
    zb-h1        1               (p - 1) (F + I - W), W at most F     p
    zb-v         2               (p - 1) F / 2, where F = I = W       p

4 micro-batches through 3 stages with 1f1b and with zb-h1, as `draw` shows them:

    stage 0  F0 F1 F2 .  .  .  .  B0=== F3 B1=== .  B2=== .  B3===
    stage 1  .  F0 F1 .  .  B0=== F2 B1=== F3 B2=== .  B3=== .  .
    stage 2  .  .  F0 B0=== F1 B1=== F2 B2=== F3 B3=== .  .  .  .

    stage 0  F0 F1 F2 .  .  B0=== F3 B1=== B2=== B3===
    stage 1  .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    stage 2  .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

All work for any number of micro-batches, also for fewer than stages; with 0 a stage has nothing to do.
Nobody waits for the gradient of chunk 0's input, so that its backward is never split in two.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise

from hpc_train.errors import UserError
from hpc_train.pipeline.actions import Action, Kind, Order, actions_of
from hpc_train.pipeline.schedule_file import forwards_in_file, read, resized, stage_in_file


def gpipe(stages: int, micro_batches: int) -> Order:
    """All forwards, then all backwards (Huang et al., GPipe, 2019).

    Backwards run first in, first out: the gradient that comes first belongs to the micro-batch
    that the last stage saw first.
    """
    numbers = range(micro_batches)
    return [actions_of(s, Kind.F, numbers) + actions_of(s, Kind.B, numbers) for s in range(stages)]


def one_f_one_b(stages: int, micro_batches: int) -> Order:
    """Backward as early as it can be (Narayanan et al., PipeDream-Flush, 2021).

    A stage runs ahead by one forward for each stage after it, then takes turns: forward, backward.
    """
    order = []
    for stage in range(stages):
        forwards, backwards = (actions_of(stage, kind, range(micro_batches)) for kind in (Kind.F, Kind.B))
        order.append(_take_turns(forwards, backwards, stages - 1 - stage))
    return order


def interleaved(stages: int, micro_batches: int, chunks: int = 2) -> Order:
    """1f1b over several chunks a stage, chunk c on stage c % stages (Narayanan et al., Megatron-LM, 2021).

    Micro-batches go chunk after chunk in groups of as many as there are stages, or of more where that does
    not divide them: a group of fewer would leave stages idle, and in some sizes deadlock.
    """
    num_groups = max(1, micro_batches // stages)
    ends = [-(-micro_batches * group // num_groups) for group in range(num_groups + 1)]
    groups = [range(begin, end) for begin, end in pairwise(ends)]
    order = []
    for stage in range(stages):
        held = range(stage, stages * chunks, stages)
        forwards = [a for group in groups for chunk in held for a in actions_of(chunk, Kind.F, group)]
        backwards = [
            a for group in groups for chunk in reversed(held) for a in actions_of(chunk, Kind.B, group)
        ]
        ahead = (chunks - 1) * len(groups[0]) + 2 * (stages - 1 - stage)
        order.append(_take_turns(forwards, backwards, ahead))
    return order


def zb_h1(stages: int, micro_batches: int) -> Order:
    """1f1b whose stages put backwards for the weights off (Qi et al., arXiv 2401.10241, ZB-H1).

    A stage runs ahead as in 1f1b, and puts off as many W as there are stages before it: gradients get to
    stage 0 the earlier, and the W that are left fill the time in which 1f1b waits at the end. No stage
    keeps more than the activations of `stages` micro-batches, as many as stage 0 of 1f1b.
    """
    order = []
    for stage in range(stages):
        forwards, inputs, weights = (
            iter(actions_of(stage, kind, range(micro_batches))) for kind in (Kind.F, Kind.I, Kind.W)
        )
        row = _take(stages - 1 - stage, forwards)
        row += _take(stage, forwards, inputs)
        row += _take(micro_batches, forwards, inputs, weights)
        order.append(_joined(row + list(weights)))
    return order


def zb_v(stages: int, micro_batches: int) -> Order:
    """Two chunks a stage, down and up again as a V (Qi et al., arXiv 2401.10241, section 6, and 2405.15362).

    Chunk c is on stage c, or on 2 stages - 1 - c, so that the last stage goes on with its own output and
    stage 0 has the loss. This is the order of torch.distributed.pipelining's ScheduleZBVZeroBubble: one for
    at least 2 stages - 1 micro-batches, of which those that are not there are left out.
    """
    numbers = range(max(2 * stages - 1, micro_batches))
    order = []
    for stage in range(stages):
        down, up, rest = stage, 2 * stages - 1 - stage, stages - stage
        f, i, w = (iter(actions_of(down, kind, numbers)) for kind in (Kind.F, Kind.I, Kind.W))
        f_up, i_up, w_up = (iter(actions_of(up, kind, numbers)) for kind in (Kind.F, Kind.I, Kind.W))
        row = _take(2 * rest - 1, f) + _take(stage, f_up, f) + _take(rest, f_up, i_up, w_up)
        row += _take(len(numbers) - stages - rest + 1, f, i, w, f_up, i_up, w_up)
        row += _take(rest - 1, i, w, f_up, i_up, w_up)
        row += _take(stage, i, i_up) + _take(rest, i, w) + [*w_up, *w]
        order.append(_joined([action for action in row if action.micro_batch < micro_batches]))
    return order


def forward_only(order: Order) -> Order:
    """The forwards of an order alone, as evaluation needs them: what they wait for is still before them."""
    return [[action for action in row if action.kind is Kind.F] for row in order]


@dataclass(frozen=True)
class Schedule:
    """A rule that gives an order for every number of micro-batches.

    Attributes:
        name: as the settings give it.
        chunks: how many chunks a stage holds; there are `stages * chunks` in all.
        rule: the order of (stages, micro-batches).
        place: the stage of (chunk, stages).
        forward_rule: the order of (stages, micro-batches) where there are forwards only, in which all stages
            take messages in the order in which they are sent; without it the forwards of `rule`, if they do.
    """

    name: str
    chunks: int
    rule: Callable[[int, int], Order]
    place: Callable[[int, int], int]
    forward_rule: Callable[[int, int], Order] | None = None

    def stage_of(self, chunk: int, stages: int) -> int:
        """The stage that holds `chunk`.

        Raises:
            UserError: the schedule is a file's, for another number of stages.
        """
        return self.place(chunk, stages)

    def order(self, stages: int, micro_batches: int) -> Order:
        """The actions of every stage, for 0 micro-batches or more.

        Raises:
            UserError: the schedule is a file's, for another number of stages.
        """
        return self.rule(stages, micro_batches)

    def forwards(self, stages: int, micro_batches: int) -> Order:
        """The actions of every stage for an evaluation.  Raises UserError as `order` does."""
        if self.forward_rule is None:
            return forward_only(self.rule(stages, micro_batches))
        return self.forward_rule(stages, micro_batches)


_NAMES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")


def find(name: str, chunks_a_stage: int | None = None) -> Schedule:
    """The schedule that the settings name.

    Args:
        name: gpipe, 1f1b, interleaved, zb-h1, zb-v, or the path of a .csv file (schedule_file.py).
        chunks_a_stage: 2 or more for interleaved (without it 2); for the others what they are made for.

    Raises:
        UserError: there is no such schedule, or not with so many chunks, or the file is not sound.
    """
    schedule = _find(name, chunks_a_stage)
    if chunks_a_stage not in (None, schedule.chunks):
        fix = "take 1f1b" if chunks_a_stage == 1 else "interleaved takes any number from 2"
        raise UserError(
            f"schedule {name} gives each stage {schedule.chunks} chunks, not {chunks_a_stage}: {fix}"
        )
    return schedule


def _find(name: str, chunks_a_stage: int | None) -> Schedule:
    if name.endswith(".csv"):
        order = read(name)
        chunks = len({action.chunk for action in order[0]})
        return Schedule(
            name,
            chunks,
            partial(resized, name, order),
            partial(stage_in_file, name, order),
            partial(forwards_in_file, name, order),
        )
    if name in ("gpipe", "1f1b", "zb-h1"):
        rule = {"gpipe": gpipe, "1f1b": one_f_one_b, "zb-h1": zb_h1}[name]
        return Schedule(name, 1, rule, lambda chunk, stages: chunk)
    if name == "interleaved":
        chunks = max(2, chunks_a_stage or 0)
        return Schedule(
            name, chunks, partial(interleaved, chunks=chunks), lambda chunk, stages: chunk % stages
        )
    if name == "zb-v":
        return Schedule(name, 2, zb_v, lambda chunk, stages: min(chunk, 2 * stages - 1 - chunk))
    raise UserError(f"no schedule {name!r}: known are {', '.join(_NAMES)}, and files that end in .csv")


def _take_turns(forwards: list[Action], backwards: list[Action], ahead: int) -> list[Action]:
    """`ahead` forwards, then forward and backward in turns, then the backwards that are left."""
    remaining = iter(backwards)
    turns = [action for pair in zip(forwards[ahead:], remaining, strict=False) for action in pair]
    return forwards[:ahead] + turns + list(remaining)


def _take(times: int, *sources: Iterator[Action]) -> list[Action]:
    """`times` times the next action of each source, passing over those that have no more."""
    return [action for _ in range(times) for source in sources for action in islice(source, 1)]


def _joined(row: Iterable[Action]) -> list[Action]:
    """The row with B for I and W of chunk 0 that stand side by side: only others' I has a taker."""
    joined: list[Action] = []
    for action in row:
        if action.kind is Kind.W and action.chunk == 0 and joined[-1] == action._replace(kind=Kind.I):
            joined[-1] = action._replace(kind=Kind.B)
        else:
            joined.append(action)
    return joined
