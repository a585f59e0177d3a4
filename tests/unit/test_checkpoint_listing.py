"""Which checkpoints there are: the newest written first, and the broken ones with their cause."""

import pytest

from hpc_train.checkpoint import manifest as manifests
from hpc_train.checkpoint.listing import first_whole, list_directory, look, none_whole
from hpc_train.checkpoint.manifest import FORMAT, Manifest
from hpc_train.errors import UserError


def put(directory, step, serial):
    path = directory / f"step-{step:08d}"
    path.mkdir(parents=True)
    manifests.write(path, Manifest(format=FORMAT, step=step, serial=serial, files={}, tensors={}, state={}))
    return path


@pytest.fixture
def run(tmp_path):
    """A run that went back: step 2 was written last; step 6 was not finished."""
    for serial, step in enumerate((1, 4, 2)):
        put(tmp_path / "checkpoints", step, serial)
    (tmp_path / "checkpoints" / "step-00000006").mkdir()
    (tmp_path / "checkpoints" / "step-00000006.mine").mkdir()
    (tmp_path / "checkpoints" / "notes.txt").write_text("not a checkpoint")
    return tmp_path


def steps(listing):
    return [saved.manifest.step for saved in listing.saved]


def test_the_one_that_was_written_last_is_the_newest(run):
    listing = list_directory(run / "checkpoints")
    assert steps(listing) == [2, 4, 1]
    assert {path.name: cause for path, cause in listing.broken.items()} == {
        "step-00000006": "it has no manifest.json: saving was not finished"
    }


def test_a_file_with_the_name_of_a_checkpoint_is_a_broken_one(tmp_path):
    (tmp_path / "step-00000001").write_text("")
    (cause,) = list_directory(tmp_path).broken.values()
    assert "Not a directory" in cause


def test_no_directory_has_no_checkpoints(tmp_path):
    assert list_directory(tmp_path / "none") == ([], {})


@pytest.mark.parametrize("inside", [".", "checkpoints"])
def test_a_run_and_its_checkpoints_mean_the_same(run, inside):
    assert steps(look(run / inside)) == [2, 4, 1]


def test_one_checkpoint_means_itself(run):
    assert steps(look(run / "checkpoints" / "step-00000004")) == [4]
    (run / "checkpoints" / "step-00000004").rename(run / "best")
    assert steps(look(run / "best")) == [4]


def test_one_broken_checkpoint_means_itself(run):
    path = run / "checkpoints" / "step-00000006"
    assert look(path).saved == []
    assert list(look(path).broken) == [path]


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("none", "none is not there: give the directory of a run or of a checkpoint"),
        ("file", "file is a file: give the directory of a run or of a checkpoint"),
        ("empty", r"empty holds no checkpoint \(looked for checkpoints/step-\*/manifest\.json\)"),
        ("fresh", r"fresh holds no checkpoint"),
    ],
)
def test_a_path_that_is_none_of_these_is_told(tmp_path, path, line):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "fresh" / "checkpoints").mkdir(parents=True)
    with pytest.raises(UserError, match=line):
        look(tmp_path / path)


def test_the_first_whole_one_and_those_passed_over(run):
    listing = list_directory(run / "checkpoints")
    found, passed = first_whole(listing, lambda saved: "it rusts" if saved.manifest.step == 2 else "")
    assert found.manifest.step == 4
    assert {path.name: cause for path, cause in passed.items()} == {
        "step-00000006": "it has no manifest.json: saving was not finished",
        "step-00000002": "it rusts",
    }


def test_none_whole_is_told_with_a_cause(run):
    found, passed = first_whole(list_directory(run / "checkpoints"), lambda saved: "it rusts")
    assert found is None
    assert str(none_whole(run, passed)) == (
        f"{run} has no whole checkpoint, but 4 broken: "
        "step-00000006: it has no manifest.json: saving was not finished"
    )
    one = run / "checkpoints" / "step-00000004"
    assert str(none_whole(one, {one: "it rusts"})) == f"{one} is not whole: it rusts"
