"""A bad order is refused with a table that marks the failing cell."""

import random

import pytest

from hpc_train.pipeline.actions import Kind, parse, placement
from hpc_train.pipeline.check import validate
from hpc_train.pipeline.schedules import interleaved, one_f_one_b, zb_h1, zb_v


def refusal(text):
    with pytest.raises(ValueError, match=r".") as caught:
        validate(parse(text))
    return str(caught.value)


def test_an_action_twice():
    assert refusal("0F0 0F0 0B0") == (
        "0F0 is there twice\n             #0   #1     #2\n    stage 0  0F0  >0F0<  0B0"
    )
    assert refusal("0F0 0I0 0W0 0W0").startswith("0W0 is there twice")
    assert refusal("0F0 0B0 0B0").startswith("0B0 is there twice")


def test_an_action_missing():
    assert refusal("0F0 0F1 0B0 0B1\n1F0 1F1 1B0") == (
        "1B1 is missing\n"
        "             #0   #1   #2   #3\n"
        "    stage 0  0F0  0F1  0B0  0B1\n"
        "    stage 1  1F0  1F1  1B0  >?<"
    )
    assert refusal("0F0 0B0\n1F0 1I0").startswith("1W0 is missing")
    assert refusal("0F0 0F1 0B0 0B1\n1F0 1B0 1B1").startswith("1B1 has no 1F1 before it")


def test_a_micro_batch_number_left_out():
    assert refusal("0F0 0F2 0B0 0B2").startswith("0F1 is missing")


def test_an_absurd_number_costs_no_memory():
    assert refusal("0F0 0F999999999 0B0 0B999999999").startswith("0F1 is missing")
    assert refusal("0F0 0B0\n999999999F0 999999999B0").startswith(
        "chunk 1 is on no stage, chunk 999999999 is"
    )


def test_backward_before_forward():
    message = refusal("0F0 0B1 0B0 0F1")
    assert message.startswith("0B1 has no 0F1 before it")
    assert ">0B1<" in message
    assert refusal("0W0 0F0 0I0").startswith("0W0 has no 0I0 before it")
    assert refusal("0F0 0W0 0I0").startswith("0W0 has no 0I0 before it")


@pytest.mark.parametrize("backwards", ["0B0 0I0 0W0", "0B0 0W0", "0I0 0B0", "0I0 0W0 0B0"])
def test_a_backward_is_whole_or_in_two_halves(backwards):
    assert "are both there: a backward is B, or I and W" in refusal("0F0 " + backwards)


def test_a_backward_may_be_whole_for_one_micro_batch_and_split_for_another():
    validate(parse("0F0 0F1 0B0 0B1\n1F0 1I0 1F1 1B1 1W0"))


def test_a_chunk_on_two_stages():
    message = refusal("0F0 0B0\n0F1 1F0 1B0 0B1")
    assert message.startswith("chunk 0 is on stage 0 and on stage 1\n")
    assert message.endswith("stage 1  >0F1<  1F0  1B0  0B1")


def test_a_chunk_on_no_stage_and_a_stage_without_a_chunk():
    assert refusal("0F0 0B0\n2F0 2B0").startswith("chunk 1 is on no stage, chunk 2 is")
    assert refusal("0F0 0B0\n\n1F0 1B0") == (
        "stage 1 has nothing to do\n"
        "             #0   #1\n"
        "    stage 0  0F0  0B0\n"
        "    stage 1  >?<\n"
        "    stage 2  1F0  1B0"
    )


def test_deadlock_names_who_waits_for_whom():
    assert refusal("0F0 0B0 0F1 0B1\n1F0 1F1 1I0 1W0 1B1") == (
        "deadlock: 0B0 waits for 1I0; 1F1 waits for 0F1\n"
        "             #0   #1     #2   #3   #4\n"
        "    stage 0  0F0  >0B0<  0F1  0B1\n"
        "    stage 1  1F0  >1F1<  1I0  1W0  1B1"
    )


def test_deadlock_of_a_stage_with_itself():
    """There is no message between chunks of one stage: the row itself has to bring them in order."""
    assert refusal("1F0 0F0 1B0 0B0").startswith("deadlock: 1F0 waits for 0F0")
    assert refusal("0F0 1F0 0B0 1B0").startswith("deadlock: 0B0 waits for 1B0")
    validate(parse("0F0 1F0 1B0 0B0"))


def test_a_failure_in_a_long_order_shows_its_surroundings_only():
    order = one_f_one_b(64, 256)
    order[40].insert(200, order[40][3])
    with pytest.raises(ValueError, match="40F3 is there twice") as caught:
        validate(order)
    lines = str(caught.value).splitlines()
    assert [line.split("  ")[2].strip() for line in lines[2:]] == ["stage 39", "stage 40", "stage 41"]
    assert ">40F3<" in lines[3]
    assert max(map(len, lines)) < 140


def test_a_deadlock_of_many_stages_names_four():
    order = one_f_one_b(16, 4)
    order[15] = order[15][1:2] + order[15][:1] + order[15][2:]  # 15B0 first: refused before any walk
    with pytest.raises(ValueError, match="15B0 has no 15F0 before it"):
        validate(order)
    order = one_f_one_b(16, 4)
    order[0] = order[0][:1] + [a for a in order[0] if a.micro_batch == 0][1:] + order[0][1:4]
    order[0] += [a for a in one_f_one_b(16, 4)[0] if a.kind is Kind.B and a.micro_batch]
    with pytest.raises(ValueError, match=r"deadlock: 0B0 waits for 1B0; .*, and 1[0-9] more\n"):
        validate(order)


def test_other_orders_than_ours_may_be_sound():
    validate(parse("0F0 0F1 0B1 0B0\n1F1 1F0 1B0 1B1"))


def can_run(order):
    """The slow way: try every stage again and again."""
    stage_of, position = placement(order), [0] * len(order)
    done = set()
    progress = True
    while progress:
        progress = False
        for stage, row in enumerate(order):
            if position[stage] < len(row):
                chunk, kind, number = row[position[stage]]
                if kind is Kind.F:
                    needs = {(chunk - 1, "output", number)} if chunk else set()
                elif kind is Kind.W or chunk == len(stage_of) - 1:
                    needs = set()
                else:
                    needs = {(chunk + 1, "gradient", number)}
                if needs <= done:
                    gives = "output" if kind is Kind.F else "nothing" if kind is Kind.W else "gradient"
                    done.add((chunk, gives, number))
                    position[stage] += 1
                    progress = True
    return all(at == len(row) for at, row in zip(position, order, strict=True))


@pytest.mark.parametrize(("make", "swaps"), [(one_f_one_b, 12), (zb_h1, 12), (interleaved, 20), (zb_v, 40)])
def test_orders_shuffled_at_random_run_or_are_refused(make, swaps):
    draw = random.Random(3)
    outcomes = {True: 0, False: 0}
    for _ in range(300):
        order = make(3, 3)
        for _ in range(draw.randint(1, swaps)):
            row = draw.choice(order)
            at = draw.randrange(len(row) - 1)
            if row[at][::2] != row[at + 1][::2]:  # keeps a chunk's F, I and W of a micro-batch in order
                row[at], row[at + 1] = row[at + 1], row[at]
        sound = can_run(order)
        outcomes[sound] += 1
        if sound:
            validate(order)
        else:
            with pytest.raises(ValueError, match="deadlock"):
                validate(order)
    assert min(outcomes.values()) > 20
