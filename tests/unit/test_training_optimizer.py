"""The update rule, its learning rate, and clipping, against what torch and the papers say."""

import itertools
import math

import pytest
import torch
from torch import nn

from hpc_train.config import OptimizerSettings
from hpc_train.training.clip import clip_, squared_norm
from hpc_train.training.optimizer import learning_rate, make_optimizer, set_learning_rate


def test_warm_up_then_half_a_cosine():
    settings = OptimizerSettings(learning_rate=1.0, final_learning_rate=0.1, warmup_steps=4)
    rates = [learning_rate(settings, step, 104) for step in range(105)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert rates[54] == pytest.approx(0.55)
    assert rates[104] == pytest.approx(0.1)
    assert all(a >= b for a, b in itertools.pairwise(rates[4:]))


def test_constant_after_warm_up():
    settings = OptimizerSettings(learning_rate=2.0, decay="constant", warmup_steps=1)
    assert {learning_rate(settings, step, 10) for step in range(10)} == {2.0}


def test_no_optimizer_without_parameters():
    assert make_optimizer(OptimizerSettings(), []) is None
    assert make_optimizer(OptimizerSettings(), [nn.Parameter(torch.ones(2), requires_grad=False)]) is None


def test_only_matrices_decay():
    model = nn.Linear(3, 2)
    optimizer = make_optimizer(
        OptimizerSettings(name="sgd", learning_rate=0.5, weight_decay=0.2, momentum=0.0), model.parameters()
    )
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    torch.testing.assert_close(model.weight, before["weight"] * 0.9)
    torch.testing.assert_close(model.bias, before["bias"])


def test_the_rate_reaches_every_group():
    optimizer = make_optimizer(OptimizerSettings(weight_decay=0.1), nn.Linear(3, 2).parameters())
    set_learning_rate(optimizer, 0.125)
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125]


def test_clipping_is_torchs():
    generator = torch.Generator().manual_seed(0)
    ours = [torch.randn(shape, generator=generator) for shape in [(3, 4), (5,), (2, 2, 2)]]
    theirs = [nn.Parameter(torch.zeros_like(g)) for g in ours]
    for p, g in zip(theirs, ours, strict=True):
        p.grad = g.clone()
    norm = torch.nn.utils.clip_grad_norm_(theirs, 0.7)
    assert math.sqrt(squared_norm(ours)) == pytest.approx(float(norm), rel=1e-6)
    clip_(ours, float(norm), 0.7)
    for p, g in zip(theirs, ours, strict=True):
        torch.testing.assert_close(g, p.grad)


def test_a_small_norm_and_no_limit_leave_gradients_alone():
    gradient = torch.tensor([3.0, 4.0])
    clip_([gradient], 5.0, 6.0)
    clip_([gradient], 5.0, 0.0)
    assert gradient.tolist() == [3.0, 4.0]


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_one_bad_element_shows_in_the_norm(bad):
    assert not math.isfinite(squared_norm([torch.ones(3), torch.tensor([1.0, bad])]))
    assert squared_norm([]) == 0.0
