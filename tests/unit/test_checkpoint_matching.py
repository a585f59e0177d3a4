"""What a model wants against what a checkpoint has: one line with names and numbers, or nothing."""

import pytest

from hpc_train.checkpoint.matching import layers_left, layers_of, mismatch, spans, usable

HELD = {
    "layers.0.weight": (4, 3),
    "layers.0.bias": (4,),
    "layers.1.weight": (2, 4),
    "optimizer/layers.0.weight/step": (),
    "optimizer/layers.0.weight/exp_avg": (4, 3),
    "optimizer/layers.0.bias/step": (),
    "optimizer/layers.0.bias/exp_avg": (4,),
}
ADAM = {name: shape for name, shape in HELD.items() if "layers.0" in name}


def without(*names):
    return {name: shape for name, shape in HELD.items() if name not in names}


@pytest.mark.parametrize(
    "wanted",
    [
        pytest.param(HELD, id="all"),
        pytest.param({"layers.1.weight": (2, 4)}, id="one layer of it"),
        pytest.param({}, id="a stage without state"),
        pytest.param(
            {"layers.1.weight": (2, 4), "optimizer/layers.1.weight/x": (9,)}, id="another optimizer"
        ),
    ],
)
def test_a_fitting_model_has_no_mismatch(wanted):
    assert mismatch(HELD, wanted) == ""


@pytest.mark.parametrize(
    ("wanted", "line"),
    [
        ({"layers.1.weight": (2, 5)}, "layers.1.weight is [2, 4] there and [2, 5] in this model"),
        ({"layers.1.weight": (2, 4, 1)}, "layers.1.weight is [2, 4] there and [2, 4, 1] in this model"),
        ({"layers.2.bias": ()}, "the model's layers.2.bias [] is not in it: it holds layers 0-1"),
        ({"layers.0.weight": (4, 3)}, "its layers.0.bias [4] is not in this model"),
    ],
)
def test_a_mismatch_is_one_line_with_the_numbers(wanted, line):
    assert mismatch(HELD, wanted) == line


def test_a_smaller_model_leaves_layers():
    assert layers_left(HELD, {0, 1}) == layers_left(HELD, {0, 1, 2}) == ""
    assert layers_left(HELD, {0}) == "it holds layers 0-1, and this model has only layers 0"


def test_all_that_fits_is_used():
    names, anew = usable(HELD, ADAM)
    assert set(names) == set(ADAM)
    assert anew == []


@pytest.mark.parametrize("lacking", ["optimizer/layers.0.weight/step", "optimizer/layers.0.weight/exp_avg"])
def test_half_of_a_parameters_optimizer_state_is_not_used(lacking):
    names, anew = usable(without(lacking), ADAM)
    assert anew == ["layers.0.weight"]
    assert set(names) == {name for name in ADAM if not name.startswith("optimizer/layers.0.weight")}


def test_optimizer_state_of_another_shape_is_not_used():
    wanted = {"layers.0.bias": (4,), "optimizer/layers.0.bias/exp_avg": (5,)}
    assert usable(HELD, wanted) == (["layers.0.bias"], ["layers.0.bias"])


def test_what_sums_remember_is_used_where_it_fits_and_is_no_reason_to_refuse():
    held = HELD | {"residual/layers.0.weight": (4, 3), "powersgd/layers.0.weight": (3, 2)}
    wanted = {"layers.0.weight": (4, 3), "layers.0.bias": (4,), "residual/layers.0.weight": (4, 3)}
    wanted |= {"residual/layers.0.bias": (4,), "powersgd/layers.0.weight": (3, 4)}
    assert mismatch(held, wanted) == mismatch(HELD, wanted) == mismatch(held, ADAM) == ""
    assert usable(held, wanted) == (["layers.0.weight", "layers.0.bias", "residual/layers.0.weight"], [])
    assert usable(HELD, wanted) == (["layers.0.weight", "layers.0.bias"], [])


def test_optimizer_state_that_nobody_wants_is_not_read():
    assert usable(HELD, {"layers.0.bias": (4,)}) == (["layers.0.bias"], [])


def test_layers_are_those_of_parameters_and_buffers():
    assert layers_of([*HELD, "optimizer/layers.7.weight/step"]) == {0, 1}


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ([0], "layers 0"),
        ([3, 2, 1, 0], "layers 0-3"),
        ([0, 1, 2, 5, 7, 8], "layers 0-2, 5, 7-8"),
        ([], "no layers"),
    ],
)
def test_spans(layers, text):
    assert spans(layers) == text
