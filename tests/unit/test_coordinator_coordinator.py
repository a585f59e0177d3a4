"""The exchange, step by step as its table says, on one rank by hand and on several by loopback."""

import random
import signal
import threading
from dataclasses import replace

import pytest

from hpc_train.comm.loopback import run_ranks
from hpc_train.coordinator.coordinator import Coordinator
from hpc_train.coordinator.plan import Plan
from hpc_train.coordinator.policies.equal_shares import EqualShares
from hpc_train.coordinator.policies.save_every import SaveEvery
from hpc_train.coordinator.policies.stop_at import StopAt
from hpc_train.coordinator.policies.stop_on_signal import StopOnSignal
from hpc_train.coordinator.policy import decide
from hpc_train.coordinator.report import Report
from hpc_train.errors import PeerLost

FIRST = Plan(step=1, batch_size=12, shares=(12,))


class Watched:
    """A control plane that takes note of what is started and of what is waited for."""

    def __init__(self, control, events):
        self.rank, self.size = control.rank, control.size
        self._control = control
        self._events = events

    def gather(self, record):
        return self._started("reports of step", Report.unpack(record).step, self._control.gather(record))

    def broadcast(self, record, num_bytes):
        step = Plan.unpack(record).step if record is not None else None
        return self._started("plan", step, self._control.broadcast(record, num_bytes))

    def _started(self, what, step, pending):
        self._events.append(("start", what, step))
        return WatchedPending(self._events, what, step, pending)


class WatchedPending:
    def __init__(self, events, what, step, pending):
        self._told = ("wait", what, step)
        self._events = events
        self._pending = pending

    def result(self):
        self._events.append(self._told)
        return self._pending.result()


class Noting:
    """A policy that takes note of what it decides from what."""

    def __init__(self, events):
        self._events = events

    def decide(self, reports, plan):
        self._events.append(("decide", plan.step, sorted({report.step for report in reports})))
        return plan


def test_the_table_step_by_step():
    def body(world):
        events = []
        coordinator = Coordinator(Watched(world.control, events), FIRST, [Noting(events)])
        table = [("before", list(events))]
        report = None
        for step in range(1, 6):
            events.clear()
            plan = coordinator.exchange(report)
            table.append((plan.step, list(events)))
            report = Report(world.rank, step, 4)
        events.clear()
        coordinator.close()
        return [*table, ("close", list(events))]

    first, *others = run_ranks(3, body)
    assert first == [
        ("before", [("decide", 1, [])]),
        (1, [("decide", 2, [])]),
        (2, [("decide", 3, []), ("start", "reports of step", 1)]),
        (
            3,
            [
                ("wait", "reports of step", 1),
                ("decide", 4, [1]),
                ("start", "plan", 4),
                ("start", "reports of step", 2),
            ],
        ),
        (
            4,
            [
                ("wait", "plan", 4),
                ("wait", "reports of step", 2),
                ("decide", 5, [2]),
                ("start", "plan", 5),
                ("start", "reports of step", 3),
            ],
        ),
        (
            5,
            [
                ("wait", "plan", 5),
                ("wait", "reports of step", 3),
                ("decide", 6, [3]),
                ("start", "plan", 6),
                ("start", "reports of step", 4),
            ],
        ),
        ("close", [("wait", "plan", 6), ("wait", "reports of step", 4)]),
    ]
    for table in others:  # the same but for what rank 0 alone decides; nobody else knows a plan beforehand
        assert [step for step, _ in table] == ["before", 1, 2, 3, 4, 5, "close"]
        assert table[3] == (
            3,
            [("wait", "reports of step", 1), ("start", "plan", None), ("start", "reports of step", 2)],
        )
        decided = [event for _, events in table for event in events if event[0] == "decide"]
        assert decided == [("decide", 1, []), ("decide", 2, []), ("decide", 3, [])]


class SlowestSets:
    """The scale is what the slowest rank's time makes it: it differs wherever reports do."""

    def decide(self, reports, plan):
        return replace(plan, learning_rate_scale=max((r.compute_s for r in reports), default=1.0))


def test_all_ranks_get_the_plans_that_the_policies_make_of_the_reports():
    steps, ranks = 20, 4
    draw = random.Random(3)
    times = [[draw.random() for _ in range(ranks)] for _ in range(steps)]
    first = Plan(1, 30, (0, 0, 0, 0))
    policies = [EqualShares(), SlowestSets(), SaveEvery(6, steps)]

    def body(world):
        coordinator = Coordinator(world.control, first, policies)
        plans, report = [], None
        for step in range(1, steps + 1):
            plans.append(coordinator.exchange(report))
            report = Report(world.rank, step, 7, compute_s=times[step - 1][world.rank])
        coordinator.close()
        return plans

    by_rank = run_ranks(ranks, body)
    assert all(plans == by_rank[0] for plans in by_rank)
    for number, plan in enumerate(by_rank[0], start=1):
        reports = [Report(r, number - 3, 7, compute_s=times[number - 4][r]) for r in range(ranks)]
        draft = replace(first, step=number)
        assert plan == decide(policies, reports if number > 3 else [], draft)


@pytest.mark.parametrize("victim", range(3))
@pytest.mark.parametrize("at", [1, 4])
def test_a_signal_on_any_rank_is_in_the_plan_two_exchanges_later(victim, at):
    """Seen in step `at`, handed in at the exchange of step `at` + 1: the last step is `at` + 3."""

    def body(world):
        coordinator = Coordinator(world.control, FIRST, [SaveEvery(0, 100), StopOnSignal()])
        plans, report = [], None
        while not plans or not plans[-1].stop:
            plans.append(coordinator.exchange(report))
            seen = world.rank == victim and len(plans) >= at  # the flag stays up
            report = Report(world.rank, len(plans), 4, signal=signal.SIGTERM if seen else 0)
        coordinator.close()
        return plans

    by_rank = run_ranks(3, body)
    assert all(plans == by_rank[0] for plans in by_rank)
    *before, last = by_rank[0]
    assert last.step == at + 3
    assert last.save
    assert last.reason == f"SIGTERM on rank {victim}"
    assert not any(plan.save or plan.stop for plan in before)


def test_a_stop_without_reports_comes_at_its_step():
    def body(world):
        coordinator = Coordinator(world.control, replace(FIRST, step=8), [StopAt(9)])
        plans = [coordinator.exchange(None), coordinator.exchange(Report(world.rank, 8, 12))]
        coordinator.close()
        return plans

    for plans in run_ranks(2, body):
        assert [(plan.step, plan.stop) for plan in plans] == [(8, False), (9, True)]


@pytest.mark.parametrize("exchanges", range(5))
def test_close_leaves_nothing_under_way(exchanges):
    def body(world):
        events = []
        coordinator = Coordinator(Watched(world.control, events), FIRST, [])
        for step in range(exchanges):
            coordinator.exchange(Report(world.rank, step, 4) if step else None)
        coordinator.close()
        world.control.barrier()
        return events

    for events in run_ranks(3, body):
        started = [what for kind, *what in events if kind == "start"]
        waited = [what for kind, *what in events if kind == "wait"]
        assert sorted(started, key=str) == sorted(waited, key=str)
        assert len(started) == max(0, exchanges - 1) + max(0, exchanges - 2)


def test_an_exchange_waits_for_nothing_that_it_has_started():
    def body(world):
        events = []
        coordinator = Coordinator(Watched(world.control, events), FIRST, [])
        for step in range(8):
            coordinator.exchange(Report(world.rank, step, 4) if step else None)
            kinds = [kind for kind, *_ in events]
            assert kinds == sorted(kinds, key=["wait", "start"].index)
            events.clear()
        coordinator.close()

    run_ranks(2, body)


def test_rank_0_is_ahead_of_a_slow_rank_by_one_exchange_and_no_more():
    """Rank 1 enters exchange 5 when rank 0 has left it: its report of step 3 is there since exchange 4."""
    left, entering = threading.Event(), []

    def body(world):
        coordinator = Coordinator(world.control, FIRST, [])
        for number in range(1, 8):
            if world.rank == 1:
                if number == 5:
                    assert left.wait(30), "rank 0 waited for a report younger than one step"
                entering.append(number)
            coordinator.exchange(Report(world.rank, number - 1, 4) if number > 1 else None)
            if world.rank == 0 and number == 5:
                left.set()
            if world.rank == 0 and number == 6:  # decided from the report that rank 1 brings to exchange 5
                assert 5 in entering
        coordinator.close()

    run_ranks(2, body)


def test_the_others_are_ahead_of_a_slow_rank_0_by_one_exchange():
    """Rank 0 enters exchange 5 only when rank 1 has left it: plan 5 is under way since exchange 4."""
    left = threading.Event()

    def body(world):
        coordinator = Coordinator(world.control, FIRST, [])
        for number in range(1, 8):
            if world.rank == 0 and number == 5:
                assert left.wait(30), "rank 1 waited for a plan younger than one step"
            coordinator.exchange(Report(world.rank, number - 1, 4) if number > 1 else None)
            if world.rank == 1 and number == 5:
                left.set()
        coordinator.close()

    run_ranks(2, body)


def test_one_rank_is_its_own_coordinator():
    def body(world):
        coordinator = Coordinator(world.control, FIRST, [StopOnSignal()])
        plans = [
            coordinator.exchange(Report(0, step, 12, signal=signal.SIGUSR2) if step else None)
            for step in range(4)
        ]
        coordinator.close()
        return plans

    [plans] = run_ranks(1, body)
    assert [plan.stop for plan in plans] == [False, False, False, True]
    assert plans[3].reason == "SIGUSR2 on rank 0"


def test_a_rank_that_is_gone_is_told():
    def body(world):
        coordinator = Coordinator(world.control, FIRST, [])
        report = None
        for step in range(1, 3 if world.rank == 1 else 9):
            coordinator.exchange(report)
            report = Report(world.rank, step, 4)

    def survivor(world):
        if world.rank == 1:
            return body(world)
        with pytest.raises(PeerLost) as caught:
            body(world)
        return caught.value.ranks

    assert run_ranks(2, survivor)[0] == (1,)
