"""A profile: its curves, and its file."""

import pytest

from benchmarks.planner.large import transformer
from hpc_train.errors import UserError
from hpc_train.planning.profile import Curve, LayerProfile, Profile, check_profile, read_profile


def test_seconds_lie_on_lines_between_what_was_measured():
    curve = Curve.through([(8, 20.0), (2, 8.0), (32, 44.0)])
    assert [curve.seconds(samples) for samples in (2, 4, 8, 20, 32)] == [8, 12, 20, 32, 44]
    assert curve.seconds(64) == 44 + 32  # on from the last two
    assert curve.seconds(1) == 6  # and from the first two
    assert Curve.line(1.0, 2.0).seconds(4) == 9
    assert (Curve().seconds(4), Curve(points=((2, 3.0),)).seconds(4)) == (0, 6)


def test_seconds_neither_fall_with_samples_nor_below_their_share_of_the_fewest():
    assert Curve.through([(1, 5.0), (4, 4.0), (8, 6.0)]).points == ((1, 4.0), (4, 4.0), (8, 6.0))
    assert Curve.through([(2, 1.0), (4, 8.0)]).seconds(1) == 0.5


def test_a_file_gives_the_profile_back(tmp_path):
    profile = transformer(4)
    (tmp_path / "a.json").write_text(profile.to_json())
    assert read_profile(tmp_path / "a.json") == profile


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"a\.json: the file: Invalid JSON.*: measure the profile again"),
        ('{"layers": [{"forwrd": 1}]}', r"a\.json: layers\.0\.forwrd: Extra inputs are not permitted"),
        (
            '{"layers": [{"forward": {"points": [[1, -1]]}}]}',
            r"layers\.0\.forward\.points\.0\.1: .*greater than or equal",
        ),
        (
            '{"layers": [{"forward": {"points": [[2, 1], [1, 2]]}}]}',
            r"layers\.0\.forward\.points: .*samples \[2, 1\] do not rise",
        ),
        ('{"layers": []}', r"a\.json: 0 layers"),
        ('{"layers": [{"title": "a"}]}', r"a\.json: all layers take 0 s"),
    ],
)
def test_a_file_that_is_no_profile(tmp_path, text, message):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        read_profile(tmp_path / "a.json")
    assert "\n" not in str(caught.value)


def test_no_file(tmp_path):
    with pytest.raises(UserError, match=r"b\.json: no such profile"):
        read_profile(tmp_path / "b.json")


def test_parts_are_no_more_than_the_whole():
    layer = LayerProfile(forward=Curve.line(0, 1), parameter_bytes=8, tied={"embedding": 12})
    with pytest.raises(UserError, match="layer 0 has 8 bytes of parameters, but 0 frozen and 12 tied"):
        check_profile(Profile(layers=[layer]))
