"""Doors at the edges of a stage's graph: gradients pass, tensors are not kept."""

import weakref

import torch

from hpc_train.pipeline.boundary import enter, leave


def test_gradients_cross_from_graph_to_graph():
    """x -> square | sine -> y, cut at the bar, has the gradient of the uncut graph."""
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    root, exit_door = leave(x.square())
    (arrived,), (entrance,) = enter([x.detach().square()], [True])
    arrived.sin().sum().backward()
    exit_door.gradient = entrance.take_gradient()
    root.backward()
    torch.testing.assert_close(x.grad, 2 * x.detach() * x.detach().square().cos())


def test_what_entered_may_be_changed_in_place():
    (arrived,), (door,) = enter([torch.tensor([-1.0, 2.0])], [True])
    (torch.relu_(arrived) * 3).sum().backward()
    assert door.take_gradient().tolist() == [0.0, 3.0]


def test_an_entrance_that_the_loss_does_not_depend_on_has_a_gradient_of_zeros():
    _, (door,) = enter([torch.ones(2, 3, dtype=torch.float16)], [True])
    gradient = door.take_gradient()
    assert gradient.dtype == torch.float16
    assert gradient.tolist() == [[0.0] * 3] * 2


def test_an_output_is_not_kept_for_its_backward():
    weight = torch.ones(3, requires_grad=True)
    output = weight * 2
    seen = weakref.ref(output)
    root, door = leave(output)
    del output
    assert seen() is None
    door.gradient = torch.ones(3)
    root.backward()
    assert weight.grad.tolist() == [2.0] * 3


def test_a_gradient_leaves_contiguous():
    (arrived, untouched), (door,) = enter([torch.ones(2, 3), torch.ones(1)], [True, False])
    assert not untouched.requires_grad
    (arrived.t() * torch.arange(6.0).view(3, 2)).sum().backward()
    gradient = door.take_gradient()
    assert gradient.is_contiguous()
    assert gradient.tolist() == [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]]
