"""Each policy over many plans: what it sets, what it leaves alone, and that it is a pure function."""

import random
import signal
from dataclasses import replace

import pytest

from hpc_train.coordinator.plan import Plan
from hpc_train.coordinator.policies.equal_shares import EqualShares, equal_shares
from hpc_train.coordinator.policies.save_every import SaveEvery
from hpc_train.coordinator.policies.stop_at import StopAt
from hpc_train.coordinator.policies.stop_on_signal import StopOnSignal, name_of
from hpc_train.coordinator.policy import decide
from hpc_train.coordinator.report import Report

POLICIES = [EqualShares(), SaveEvery(7, 100), StopOnSignal(), StopAt(40)]
# What each may change.
SETS = {EqualShares: {"shares"}, SaveEvery: {"save"}}
STOPS = {"save", "stop", "reason"}


def drawn_plans(number, seed=0):
    draw = random.Random(seed)
    for _ in range(number):
        replicas = draw.choice([1, 2, 3, 16, 1000])
        shares = tuple(draw.randint(0, 50) for _ in range(replicas))
        yield Plan(draw.randint(1, 120), sum(shares), shares, save=draw.random() < 0.2)


def drawn_reports(plan, seed):
    draw = random.Random(seed)
    if plan.step < 4:
        return []
    signals = [0, 0, 0, signal.SIGTERM]
    return [Report(rank, plan.step - 3, 8, draw.random(), signal=draw.choice(signals)) for rank in range(3)]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_a_policy_is_pure_and_changes_only_what_is_its_own(policy):
    own = SETS.get(type(policy), STOPS)
    for seed, plan in enumerate(drawn_plans(200)):
        reports = drawn_reports(plan, seed)
        decided = policy.decide(reports, plan)
        assert policy.decide(reports, plan) == decided
        changed = {name for name in vars(plan) if getattr(plan, name) != getattr(decided, name)}
        assert changed <= own
        assert decided.save >= plan.save  # what another policy wants saved is saved
        assert not decided.stop or decided.save


def test_equal_shares_add_up_and_differ_by_one_at_most():
    draw = random.Random(1)
    for _ in range(500):
        batch_size, replicas = draw.randint(0, 5000), draw.randint(1, 300)
        shares = equal_shares(batch_size, replicas)
        assert len(shares) == replicas
        assert sum(shares) == batch_size
        assert max(shares) - min(shares) <= 1
        assert list(shares) == sorted(shares, reverse=True)


def test_equal_shares_fill_in_the_first_draft():
    assert EqualShares().decide([], Plan(1, 32, (0, 0, 0))).shares == (11, 11, 10)


@pytest.mark.parametrize(
    ("every", "last_step", "saved"),
    [(4, 10, [4, 8, 10]), (5, 10, [5, 10]), (0, 10, [10]), (1, 3, [1, 2, 3]), (20, 10, [10])],
)
def test_save_every(every, last_step, saved):
    policy = SaveEvery(every, last_step)
    steps = range(1, last_step + 1)
    assert [step for step in steps if policy.decide([], Plan(step, 4, (4,))).save] == saved


def test_stop_at_saves_and_stops_there_and_beyond():
    policy = StopAt(5)
    for step in range(1, 5):
        plan = Plan(step, 4, (4,))
        assert policy.decide([], plan) == plan
    for step in (5, 6):  # beyond: a run that was resumed after it
        decided = policy.decide([], Plan(step, 4, (4,)))
        assert decided.save
        assert decided.stop
        assert decided.reason == "step 5 is reached"


@pytest.mark.parametrize("rank", range(4))
def test_a_signal_on_any_rank_saves_and_stops(rank):
    reports = [Report(r, 1, 1, signal=signal.SIGUSR2 if r == rank else 0) for r in range(4)]
    decided = StopOnSignal().decide(reports, Plan(4, 4, (4,)))
    assert decided.save
    assert decided.stop
    assert decided.reason == f"SIGUSR2 on rank {rank}"


def test_signals_on_several_ranks_are_counted():
    reports = [Report(r, 1, 1, signal=signal.SIGTERM if r else 0) for r in range(4)]
    assert StopOnSignal().decide(reports, Plan(4, 4, (4,))).reason == "SIGTERM on rank 1 and 2 more"


def test_no_signal_changes_nothing():
    plan = Plan(4, 4, (4,))
    assert StopOnSignal().decide([], plan) == plan
    assert StopOnSignal().decide([Report(0, 1, 4), Report(1, 1, 4)], plan) == plan


def test_names_of_signals():
    assert name_of(signal.SIGTERM) == "SIGTERM"
    assert name_of(signal.SIGRTMIN + 1) == f"signal {signal.SIGRTMIN + 1}"  # it has no name


def test_the_first_reason_stands():
    told = [Report(0, 2, 4, signal=signal.SIGTERM)]
    plan = Plan(5, 4, (4,))
    assert decide([StopOnSignal(), StopAt(5)], told, plan).reason == "SIGTERM on rank 0"
    assert decide([StopAt(5), StopOnSignal()], told, plan).reason == "step 5 is reached"


def test_policies_are_asked_in_their_order_and_see_what_the_ones_before_decided():
    class Scale:
        def __init__(self, factor, plus):
            self.factor, self.plus = factor, plus

        def decide(self, reports, plan):
            return replace(plan, learning_rate_scale=plan.learning_rate_scale * self.factor + self.plus)

    draft = Plan(1, 4, (4,))
    assert decide([Scale(2, 0), Scale(1, 5)], [], draft).learning_rate_scale == 7
    assert decide([Scale(1, 5), Scale(2, 0)], [], draft).learning_rate_scale == 12
    assert decide([], [], draft) == draft


def test_shares_that_do_not_add_up_are_our_own_mistake():
    with pytest.raises(AssertionError, match=r"shares \(1, 2\) are not 4 samples"):
        decide([SaveEvery(1, 10)], [], Plan(1, 4, (1, 2)))
