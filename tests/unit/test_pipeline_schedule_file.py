"""Schedules in files: read, resized, refused with the cell that is wrong; and PyTorch's own, both ways."""

import copy
import csv
import io
import re

import pytest
from pipelines import RendezvousLinks, batch, check_parity, layers, on_stages
from torch import nn

from hpc_train.errors import UserError
from hpc_train.pipeline.actions import Kind, parse, placement
from hpc_train.pipeline.check import validate
from hpc_train.pipeline.schedule_file import read, resized, write
from hpc_train.pipeline.schedules import find, gpipe, interleaved, one_f_one_b, zb_h1, zb_v
from hpc_train.pipeline.simulate import simulate

IN_PYTORCHS_NOTATION = """\
0F0,0F1,,,0B0,,0B1
,1F0,1B0,1F1,1B1,,
"""


@pytest.fixture
def saved(tmp_path):
    def save(text):
        path = tmp_path / "schedule.csv"
        path.write_text(text)
        return str(path)

    return save


def refusal(path, call=read):
    with pytest.raises(UserError) as caught:
        call(path)
    return str(caught.value)


def test_empty_cells_are_idle(saved):
    assert read(saved(IN_PYTORCHS_NOTATION)) == parse("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")


def test_what_is_read_over(saved):
    """Blank lines, spaces, what PyTorch writes for its communication, and pairs that it overlaps."""
    text = """
0UNSHARD,0F0,0SEND_F0 , 0F1,0RECV_B0,,(0B0;)OVERLAP_F_B,0B1,0REDUCE_GRAD

1RECV_F0,1F0,1I0,1SEND_B0,(1F1;1W0)OVERLAP_F_B,1B1,1RESHARD
"""
    assert read(saved(text)) == parse("0F0 0F1 0B0 0B1\n1F0 1I0 1F1 1W0 1B1")


@pytest.mark.parametrize(
    "order", [gpipe(3, 4), one_f_one_b(1, 1), interleaved(2, 5, 3), zb_h1(4, 9), zb_v(3, 7)]
)
def test_what_is_written_is_read(order, tmp_path):
    write(tmp_path / "a.csv", order)
    assert read(tmp_path / "a.csv") == order


def test_a_schedule_of_the_settings_may_be_a_file(saved):
    schedule = find(saved(IN_PYTORCHS_NOTATION))
    assert (schedule.chunks, schedule.stage_of(1, 2)) == (1, 1)
    assert schedule.order(2, 2) == parse("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")
    assert schedule.order(2, 0) == [[], []]
    assert schedule.order(2, 1) == parse("0F0 0B0\n1F0 1B0")
    assert schedule.order(2, 3)[0] == parse("0F0 0F1 0B0 0B1 0F2 0B2")[0]


@pytest.mark.parametrize("own", [zb_v(3, 5), interleaved(3, 4), one_f_one_b(4, 3)])
def test_a_file_serves_any_number_of_micro_batches(own):
    for wanted in range(13):
        order = resized("a.csv", own, len(own), wanted)
        validate(order)
        assert sum(map(len, order)) * len({a.micro_batch for row in own for a in row}) == (
            sum(map(len, own)) * wanted
        )


def test_another_number_of_stages(saved):
    schedule = find(saved(IN_PYTORCHS_NOTATION))
    for use in (lambda: schedule.order(4, 2), lambda: schedule.stage_of(0, 4)):
        with pytest.raises(UserError, match=r"schedule.csv is for 2 stages, a row each, but the grid has 4"):
            use()


def test_another_number_of_chunks(saved):
    with pytest.raises(UserError, match=r"schedule.csv gives each stage 1 chunks, not 2"):
        find(saved(IN_PYTORCHS_NOTATION), 2)


def test_a_bad_cell_is_marked(saved):
    path = saved("0F0,,0B0\n,1F0,1X0\n")
    assert refusal(path) == (
        f"schedule {path}: '1X0' is not an action: write for instance 0F3, 0B3, 0I3 or 0W3\n"
        "             #0   #1   #2\n"
        "    stage 0  0F0       0B0\n"
        "    stage 1       1F0  >1X0<"
    )


def test_an_order_that_is_not_sound_is_marked(saved):
    message = refusal(saved("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n"))
    assert "schedule.csv: deadlock: 0B0 waits for 1B0; 1F1 waits for 0F1\n" in message
    assert message.endswith("stage 1  1F0  >1F1<  1B0  1B1")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no backward"),
        ("0F0,0F1\n1F0,1F1\n", "has no backward, and nothing would be trained"),
        ("0F0,0B0\n1F0,2F0,2B0,1B0\n", "stage 0 holds 1 chunks and stage 1 2, but all must hold as many"),
        ("0F0,0B0\n,\n", "stage 1 has nothing to do"),
        ("0F0,0B0\n0F1,0B1\n", "chunk 0 is on stage 0 and on stage 1"),
    ],
)
def test_files_that_cannot_be_used(saved, text, words):
    assert words in refusal(saved(text))


def test_files_that_cannot_be_read(tmp_path):
    assert refusal(tmp_path / "none.csv").startswith(f"cannot read the schedule {tmp_path / 'none.csv'}: ")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    assert refusal(tmp_path / "binary.csv").startswith("cannot read the schedule")


def pytorchs_rows(name, stages, micro_batches, chunks=None):
    """The rows of cells of torch.distributed.pipelining's own schedule, as it dumps them."""
    visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    rows = visualizer.get_schedule_ops(name, stages, micro_batches, chunks)
    cells = [["" if action is None else str(action) for action in row] for row in rows]
    if name == "1F1B" and f"{stages - 1}F0" not in cells[-1]:  # torch 2.13 counts the last rank's from 1
        cells[-1] = [re.sub(r"F(\d+)$", lambda found: f"F{int(found[1]) - 1}", cell) for cell in cells[-1]]
    return cells


@pytest.mark.parametrize(
    ("theirs", "chunks", "ours", "sizes"),
    [
        ("GPipe", None, gpipe, [(2, 4), (4, 3), (3, 8)]),
        ("1F1B", None, one_f_one_b, [(2, 4), (4, 8), (3, 7)]),
        ("Interleaved1F1B", 2, interleaved, [(2, 4), (4, 8), (4, 3), (4, 10), (3, 9)]),
        ("Interleaved1F1B", 3, lambda p, m: interleaved(p, m, 3), [(2, 4), (4, 8), (3, 4)]),
        ("ZBVZeroBubble", 2, zb_v, [(2, 4), (4, 8), (4, 3), (3, 17)]),
    ],
)
def test_pytorchs_schedules_are_ours(theirs, chunks, ours, sizes, tmp_path):
    """The same actions in the same order, but that we never split chunk 0's backward."""
    for stages, micro_batches in sizes:
        with open(tmp_path / "theirs.csv", "w", newline="") as file:
            csv.writer(file).writerows(pytorchs_rows(theirs, stages, micro_batches, chunks))
        order = read(tmp_path / "theirs.csv")
        split = [
            [half for action in row for half in in_halves(action, theirs)]
            for row in ours(stages, micro_batches)
        ]
        assert order == split, (stages, micro_batches)


def in_halves(action, theirs):
    if theirs == "ZBVZeroBubble" and action.kind is Kind.B:
        return [action._replace(kind=Kind.I), action._replace(kind=Kind.W)]
    return [action]


@pytest.mark.parametrize(
    "text",
    [
        "0F0,0F1,0F2,0B1,0B0,0B2\n1F1,1F0,1B1,1B0,1F2,1B2",
        "0F0,0F1,2F0,2F1,2B1,2B0,0B1,0B0\n1F1,1F0,3F0,3F1,3B1,3B0,1B1,1B0",
    ],
    ids=["1 chunk", "2 chunks"],
)
@pytest.mark.parametrize("micro_batches", [1, 2, 7])
def test_stages_that_take_forwards_in_other_orders_train_and_evaluate(text, micro_batches, saved):
    path, links = saved(text), RendezvousLinks()
    num_chunks = 4 if "3F" in text else 2
    specs, pairs = layers(*[lambda: nn.Linear(4, 4)] * num_chunks), batch([2] * micro_batches)
    check_parity(specs, [1] * num_chunks, pairs, path)
    losses = on_stages(
        specs, [1] * num_chunks, lambda p: p.evaluate(pairs, lambda output, target: {}), path, links=links
    )
    assert losses[-1]["loss"].weight == 2 * micro_batches
    links.check_all_is_over()
    validate(find(path).forwards(2, micro_batches))


@pytest.mark.parametrize(
    ("theirs", "ours", "chunks"),
    [("InterleavedZeroBubble", "zb-v", 2), ("DualPipeV", "zb-v", 2), ("LoopedBFS", "interleaved", 2)],
)
def test_pytorchs_other_schedules_can_be_used_and_are_not_faster(theirs, ours, chunks, tmp_path):
    with open(tmp_path / "theirs.csv", "w", newline="") as file:
        csv.writer(file).writerows(pytorchs_rows(theirs, 4, 12, chunks))
    schedule = find(str(tmp_path / "theirs.csv"))
    order = schedule.order(4, 12)
    validate(order)
    assert placement(order) == [schedule.stage_of(chunk, 4) for chunk in range(8)]
    ours_s = simulate(find(ours).order(4, 12), 1, 1, 1).step_s
    assert simulate(order, 1, 1, 1).step_s >= ours_s


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])
def test_pytorch_accepts_our_schedules(name):
    theirs = pytest.importorskip("torch.distributed.pipelining.schedules")
    schedule = find(name)
    for stages, micro_batches in ((2, 4), (4, 3), (3, 7), (4, 13)):
        file = io.StringIO()
        csv.writer(file).writerows(schedule.order(stages, micro_batches))
        rows = csv.reader(io.StringIO(file.getvalue()))
        order = {rank: [theirs._Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}
        chunks = schedule.chunks * stages
        places = theirs._validate_schedule(copy.deepcopy(order), stages, chunks, micro_batches)
        assert places == {chunk: schedule.stage_of(chunk, stages) for chunk in range(chunks)}
        lowered = theirs._add_send_recv(
            order, places.__getitem__, chunks
        )  # ends only if nobody waits for ever
        assert sum(map(len, lowered.values())) > sum(map(len, schedule.order(stages, micro_batches)))
