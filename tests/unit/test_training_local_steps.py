"""Local SGD: each replica by itself, and one model again where somebody looks at it."""

import copy
import math

import pytest
import torch
from torch import nn

from hpc_train.comm.loopback import run_ranks
from hpc_train.config import Settings
from hpc_train.tasks.regression import Regression
from hpc_train.training.layout import Layout
from hpc_train.training.worker import Worker

TASK = Regression(samples=40, inputs=3, hidden=8, depth=3)  # 4 layers
RATE = 0.1


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def settings(local_steps=4, stages=1, **optimizer):
    return Settings(
        task="regression",
        batch={"size": 8, "micro_batch": 2},
        grid={"stages": stages},
        train={"threads": 1},
        gradients={"local_steps": local_steps},
        optimizer={"name": "sgd", "momentum": 0.9, **optimizer},
    )


def samples(step, replica, number):
    generator = torch.Generator().manual_seed(100 * step + replica)
    return torch.randn(number, 3, generator=generator), torch.randn(number, 1, generator=generator)


def micro_batches(pair):
    return list(zip(pair[0].split(2), pair[1].split(2), strict=True))


def trained(chosen, shares, num_ranks, average=True):
    """Each rank's (place, outcomes, parameters) after these steps; `shares[step][replica]` samples."""

    def body(world):
        layout = Layout(chosen, TASK, world)
        worker = Worker(chosen, TASK, world, layout)
        outcomes = []
        for step, share in enumerate(shares):
            mine = share[layout.place.replica]
            outcomes.append(
                worker.backward(
                    micro_batches(samples(step, layout.place.replica, mine)), sum(share), own_samples=mine
                )
            )
            worker.update(outcomes[-1], RATE)
        if average:
            worker.average_parameters()
        worker.close()
        return layout.place, outcomes, {n: p.detach().clone() for n, p in worker.parameters.items()}

    return run_ranks(num_ranks, body, timeout_s=60)


def alone(shares, replica, clip_norm=0.0):
    """Plain PyTorch on one replica's samples: its losses and its model."""
    model = copy.deepcopy(TASK.plain_model(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    losses, norms = [], []
    for step, share in enumerate(shares):
        losses.append(0.0)
        if share[replica]:
            inputs, target = samples(step, replica, share[replica])
            loss = TASK.loss(model(inputs), target)
            losses[-1] = float(loss.detach().sum())
            optimizer.zero_grad()
            loss.mean().backward()
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip_norm or math.inf)))
            optimizer.step()
    return losses, norms, dict(model.named_parameters())


SHARES = [(4, 4), (6, 2), (0, 8), (5, 3)]


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("clip_norm", [0.0, 0.05])
def test_replicas_are_plain_runs_of_their_own(stages, clip_norm):
    """Also in the norm that clips, in a step without samples, and in the loss that is told."""
    chosen = settings(stages=stages, clip_norm=clip_norm)
    plain = [alone(SHARES, replica, clip_norm) for replica in range(2)]
    for place, outcomes, parameters in trained(chosen, SHARES, 2 * stages, average=False):
        for name, parameter in parameters.items():
            torch.testing.assert_close(
                parameter, plain[place.replica][2][name].detach(), rtol=1e-4, atol=1e-6
            )
        for step, outcome in enumerate(outcomes):
            told = sum(plain[replica][0][step] for replica in range(2)) / 8
            assert outcome.loss == pytest.approx(told, rel=1e-5)
        norms = [
            outcome.grad_norm for outcome, share in zip(outcomes, SHARES, strict=True) if share[place.replica]
        ]
        assert norms == pytest.approx(plain[place.replica][1], rel=1e-4)
    assert plain[0][1] != plain[1][1]


def test_the_mean_counts_replicas_by_their_samples():
    plain = [alone(SHARES, replica)[2] for replica in range(2)]
    seen = [sum(share[replica] for share in SHARES) for replica in range(2)]
    results = trained(settings(), SHARES, 2)
    for _, _, parameters in results:
        for name, parameter in parameters.items():
            expected = sum(n * p[name].detach() for n, p in zip(seen, plain, strict=True)) / sum(seen)
            torch.testing.assert_close(parameter, expected, rtol=1e-4, atol=1e-6)
            assert parameter.equal(results[0][2][name])


def test_one_local_step_is_the_sum_of_gradients():
    """With H = 1 nothing changes: one model, and the gradient of the whole batch."""
    results = trained(settings(local_steps=1), SHARES, 2)
    model = copy.deepcopy(TASK.plain_model(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    for step, share in enumerate(SHARES):
        parts = [samples(step, replica, number) for replica, number in enumerate(share)]
        inputs, target = (torch.cat(column) for column in zip(*parts, strict=True))
        optimizer.zero_grad()
        TASK.loss(model(inputs), target).mean().backward()
        optimizer.step()
    for _, _, parameters in results:
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameters[name], parameter.detach(), rtol=1e-4, atol=1e-6)


def test_a_mean_after_every_step_of_plain_sgd_is_the_sum_of_gradients():
    """Without momentum and decay, which are local, H = 1 and averaging every step are the same update."""

    def parameters(local_steps):
        chosen = settings(local_steps=local_steps, momentum=0.0)
        return trained(chosen, [(4, 4)], 2)[0][2]

    summed, averaged = parameters(1), parameters(2)
    for name in summed:
        torch.testing.assert_close(summed[name], averaged[name], rtol=1e-5, atol=1e-7)


def test_a_gradient_that_is_not_finite_on_one_replica_skips_the_step_of_all():
    chosen = settings()

    def body(world):
        layout = Layout(chosen, TASK, world)
        worker = Worker(chosen, TASK, world, layout)
        before = [p.detach().clone() for p in worker.parameters.values()]
        inputs, target = samples(0, layout.place.replica, 2)
        inputs[0, 0] = math.nan if layout.place.replica else 0.0
        outcome = worker.backward([(inputs, target)], 4, own_samples=2)
        worker.update(outcome, RATE)
        worker.average_parameters()  # of no steps
        worker.close()
        return outcome.finite, all(
            a.equal(b) for a, b in zip(before, worker.parameters.values(), strict=True)
        )

    assert run_ranks(2, body, timeout_s=30) == [(False, True)] * 2


def test_one_replica_has_nobody_to_average_with():
    ((_, outcomes, parameters),) = trained(settings(), [(4,), (4,)], 1)
    _, norms, expected = alone([(4,), (4,)], 0)
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter, expected[name].detach(), rtol=1e-4, atol=1e-6)
    assert [outcome.grad_norm for outcome in outcomes] == pytest.approx(norms, rel=1e-4)


def test_times_are_those_of_the_mean_and_nothing_hides_it():
    def body(world):
        layout = Layout(settings(), TASK, world)
        worker = Worker(settings(), TASK, world, layout)
        pair = samples(0, layout.place.replica, 4)
        worker.update(worker.backward(micro_batches(pair), 8, own_samples=4), RATE)
        before = worker.sum_times()
        worker.average_parameters()
        after = worker.sum_times()
        worker.backward(micro_batches(pair), 8, own_samples=4)
        worker.close()
        return worker.about_sums(), before, after, worker.sum_times()

    for about, before, after, later in run_ranks(2, body, timeout_s=30):
        assert about == ["gradients are not summed: parameters are averaged (local SGD)"]
        nothing = {"gradient_sum_s": 0.0, "exposed_comm_s": 0.0, "hidden_share": None}
        assert before == later == nothing
        assert after["gradient_sum_s"] == after["exposed_comm_s"] > 0
        assert after["hidden_share"] == 0.0
