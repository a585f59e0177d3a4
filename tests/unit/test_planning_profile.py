"""A profile: its lines, and its file."""

import pytest

from benchmarks.planner.large import transformer
from hpc_train.errors import UserError
from hpc_train.planning.profile import LayerProfile, Line, Profile, check_profile, read_profile


def test_a_line_through_two_measurements():
    line = Line.through((1, 3.0), (9, 19.0))
    assert (line.fixed_s, line.sample_s, line.seconds(4)) == (1.0, 2.0, 9.0)
    assert Line.through((9, 19.0), (1, 3.0)) == line


def test_a_line_through_noise_neither_falls_nor_begins_below_zero():
    assert Line.through((1, 5.0), (4, 4.0)) == Line(fixed_s=4.0)
    assert Line.through((1, 1.0), (4, 8.0)) == Line(sample_s=2.0)
    with pytest.raises(ValueError, match="two measurements of 4 samples give no line"):
        Line.through((4, 1.0), (4, 2.0))


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
            '{"layers": [{"forward": {"fixed_s": -1}}]}',
            r"layers\.0\.forward\.fixed_s: .*greater than or equal",
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
    layer = LayerProfile(forward=Line(sample_s=1), parameter_bytes=8, tied={"embedding": 12})
    with pytest.raises(UserError, match="layer 0 has 8 bytes of parameters, but 0 frozen and 12 tied"):
        check_profile(Profile(layers=[layer]))
