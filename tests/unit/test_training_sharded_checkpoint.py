"""Sharded state is saved whole, by layer: it goes on sharded or not, on any number of replicas."""

import json

import pytest
from checkpoints import assert_same_bits
from shards import Mixed, on_ranks, settings, state

pytestmark = pytest.mark.usefixtures("threads_as_before")


WAYS = [
    # (replicas, stages, sharded) that save, and that load
    ((3, 1, True), (3, 1, True)),
    ((3, 1, True), (2, 1, True)),
    ((2, 1, True), (4, 1, True)),
    ((4, 1, True), (1, 1, True)),
    ((3, 1, True), (2, 1, False)),
    ((2, 1, False), (3, 1, True)),
    ((1, 1, True), (3, 1, True)),
    ((2, 2, True), (3, 1, True)),
    ((3, 1, True), (2, 3, True)),
]


def saved(directory, replicas, stages, sharded, optimizer):
    """Three steps and a checkpoint; the tensors that each rank wrote."""
    chosen = settings(sharded, optimizer=optimizer, stages=stages)
    return on_ranks(replicas * stages, lambda run: run.train(3).save(directory), chosen)


def joined(parts):
    whole = {}
    for part in parts:
        assert not whole.keys() & part.keys()
        whole.update(part)
    return whole


@pytest.mark.parametrize("optimizer", [{"name": "adamw"}, {"name": "sgd"}, {"name": "sgd", "momentum": 0.0}])
@pytest.mark.parametrize(("before", "after"), WAYS)
def test_a_checkpoint_loads_on_any_number_of_replicas(tmp_path, before, after, optimizer):
    whole = joined(saved(tmp_path, *before, optimizer))
    replicas, stages, sharded = after
    chosen = settings(sharded, optimizer=optimizer, stages=stages)
    assert_same_bits(state(replicas * stages, lambda run: run.load(tmp_path), chosen), whole)


@pytest.mark.parametrize("optimizer", [{"name": "adamw"}, {"name": "sgd"}])
@pytest.mark.parametrize("earlier", [True, False])
def test_a_resumed_run_goes_on_as_if_never_stopped(tmp_path, earlier, optimizer):
    saved(tmp_path, 3, 1, earlier, optimizer)
    unbroken = state(3, lambda run: run.train(5), settings(False, optimizer=optimizer))
    for sharded in (True, False):
        chosen = settings(sharded, optimizer=optimizer)
        assert_same_bits(state(3, lambda run: run.load(tmp_path).train(2), chosen), unbroken)


def test_replicas_divide_the_writing(tmp_path):
    """One of them alone may have no room for the state of all."""
    parts = saved(tmp_path, 4, 1, True, {"name": "adamw"})
    whole = joined(parts)
    in_bytes = [sum(t.nbytes for n, t in part.items() if n.startswith("optimizer/")) for part in parts]
    largest = 2 * max(t.nbytes for n, t in whole.items() if n.startswith("optimizer/"))
    assert max(in_bytes) <= sum(in_bytes) / 4 + largest
    models = [[name for name in part if not name.startswith("optimizer/")] for part in parts]
    assert [len(names) > 0 for names in models] == [True, False, False, False]
    (manifest,) = (json.loads(path.read_text()) for path in tmp_path.glob("*/manifest.json"))
    assert set(manifest["tensors"]) == whole.keys()
    assert len(manifest["files"]) == 4


def test_a_replica_reads_the_state_of_its_pieces_alone(tmp_path):
    saved(tmp_path, 2, 1, True, {"name": "adamw"})

    def body(run):
        wanted = {name for name in run.worker.state_shapes() if name.startswith("optimizer/")}
        kept = {}
        cut_state = run.worker.cut_state

        def cut_and_note(name, whole):
            kept[name] = cut_state(name, whole)
            return kept[name]

        run.worker.cut_state = cut_and_note
        run.load(tmp_path)
        shapes = run.worker.state_shapes()
        assert kept.keys() == {name for name in shapes if not name.startswith("residual/")}  # nothing is owed
        kept_bytes = sum(t.untyped_storage().nbytes() for n, t in kept.items() if n in wanted and t.dim())
        assert kept_bytes == run.state_bytes()
        return wanted

    parts = on_ranks(4, body, settings(True))
    assert all(part < set.union(*parts) for part in parts)
    assert set.union(*parts) == {
        name for name in state(1, lambda run: run.train(1), settings(False)) if name.startswith("optimizer/")
    }


@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_residuals_of_lossy_sums_go_along(tmp_path, wire):
    lossy = {"wire": wire, "error_feedback": True}

    def save_and_go_on(run):
        run.train(3).save(tmp_path)
        run.train(2)

    unbroken = state(3, save_and_go_on, settings(True, **lossy))
    residuals = [tensor for name, tensor in unbroken.items() if name.startswith("residual/")]
    assert len(residuals) == sum(p.requires_grad for p in Mixed().plain_model().parameters())
    assert sum(float(tensor.abs().sum()) for tensor in residuals) > 0
    resumed = state(3, lambda run: run.load(tmp_path).train(2), settings(True, **lossy))
    assert_same_bits(resumed, unbroken)
    for num_ranks, sharded in ((2, True), (2, False)):
        loaded = state(num_ranks, lambda run: run.load(tmp_path), settings(sharded, **lossy))
        assert loaded.keys() == unbroken.keys()


def test_state_that_is_not_there_yet_is_what_torch_begins_with(tmp_path):
    """Saved before the first update: AdamW goes on from zeros as it begins without any."""
    on_ranks(3, lambda run: run.save(tmp_path), settings(True))
    fresh = state(3, lambda run: run.train(2), settings(False))
    assert_same_bits(state(3, lambda run: run.load(tmp_path).train(2), settings(False)), fresh)
    assert_same_bits(state(3, lambda run: run.load(tmp_path).train(2), settings(True)), fresh)


def test_state_of_another_optimizer_begins_anew(tmp_path):
    parameters = joined(saved(tmp_path, 2, 1, True, {"name": "adamw"}))
    sgd = settings(True, optimizer={"name": "sgd"})
    loaded = state(3, lambda run: run.load(tmp_path), sgd)
    assert_same_bits(
        {n: t for n, t in loaded.items() if not n.startswith("optimizer/")},
        {n: t for n, t in parameters.items() if not n.startswith("optimizer/")},
    )
    momenta = [tensor for name, tensor in loaded.items() if name.endswith("/momentum_buffer")]
    assert momenta
    assert not any(tensor.any() for tensor in momenta)
