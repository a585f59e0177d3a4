"""The policy that tries ways to sum gradients."""

from hpc_train.coordinator.plan import Plan
from hpc_train.coordinator.policies.tune_gradients import STEPS_EACH, TuneGradients
from hpc_train.coordinator.report import Report

DELAY = 3  # steps from a report to the plan that knows it


def run(seconds, steps, first_step=1, noise=lambda step: 0.0):
    """The plans of `steps` steps where way i takes `seconds[i]` on the slower of two ranks."""
    policy = TuneGradients(len(seconds), first_step)
    plans, reports = [], {}
    plan = Plan(first_step, 4, (4,))
    for step in range(first_step, first_step + steps):
        plan = policy.decide(reports.get(step - DELAY, []), plan)
        plans.append(plan)
        took = seconds[plan.trial] + noise(step)
        reports[step] = [
            Report(0, step, 2, compute_s=took / 2),
            Report(1, step, 2, took / 2, took / 4, took / 4),
        ]
        plan = plan.following()
    return policy, plans


def test_each_way_is_tried_for_some_steps_and_then_the_fastest_is_kept():
    policy, plans = run([0.3, 0.1, 0.2], 30)
    assert [plan.trial for plan in plans[:17]] == [0] * 5 + [1] * 5 + [2] * 7
    assert {plan.trial for plan in plans[17:]} == {1}
    assert plans[-1].trial_s[:3] == (0.3, 0.1, 0.2)
    assert [policy.done(plan) for plan in plans] == [False] * 17 + [True] * 13


def test_what_is_done_is_not_chosen_again():
    """The first counted step of the last way is disturbed; its others show that it is the fastest."""
    policy, plans = run([0.3, 0.2, 0.1], 30, noise=lambda step: 5.0 if step == 13 else 0.0)
    assert {plan.trial for plan in plans if policy.done(plan)} == {2}
    assert {plan.trial for plan in plans[10:]} == {2}


def test_the_first_steps_of_a_trial_do_not_count():
    begins = (0, STEPS_EACH, 2 * STEPS_EACH)
    _, plans = run([0.3, 0.1, 0.2], 30, noise=lambda step: 9.0 if step - 1 in begins else 0.0)
    assert plans[-1].trial_s[:3] == (0.3, 0.1, 0.2)


def test_one_disturbed_step_does_not_decide():
    _, plans = run([0.3, 0.1, 0.2], 30, noise=lambda step: 5.0 if step == 9 else 0.0)
    assert plans[-1].trial == 1


def test_it_begins_where_a_resumed_run_begins():
    _, plans = run([0.2, 0.1], 20, first_step=101)
    assert [plan.trial for plan in plans[:10]] == [0] * 5 + [1] * 5
    assert plans[-1].trial == 1


def test_a_plan_that_went_over_the_wire_goes_on_alike():
    policy, plans = run([0.3, 0.1], 20)
    for plan in plans:
        assert Plan.unpack(plan.pack()) == plan
    assert policy.decide([], Plan.unpack(plans[-1].pack()).following()).trial == 1
