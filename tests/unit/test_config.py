"""Settings: what is read, what is refused, and that a mistake is told in one line."""

import pytest

from hpc_train.config import load, parse_bytes
from hpc_train.errors import UserError

TEXT = """
task = "bytelm"

[grid]
stages = 2

[gradients]
bucket_bytes = "1MiB"
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my.toml"
    path.write_text(TEXT)
    return path


def refusal(path, *overrides):
    with pytest.raises(UserError) as caught:
        load(path, overrides)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_reads_a_file_and_fills_in_the_rest(file):
    settings = load(file)
    assert settings.grid.stages == 2
    assert settings.gradients.bucket_bytes == 2**20
    assert settings.name == "my"
    assert settings.pipeline.schedule == "1f1b"


def test_overrides_are_toml_values_or_plain_words(file):
    settings = load(
        file, ["batch.size=64", "pipeline.split=[4, 2]", "gradients.wire=fp16", "task_options.text=a=b"]
    )
    assert settings.batch.size == 64
    assert settings.pipeline.split == (4, 2)
    assert settings.gradients.wire == "fp16"
    assert settings.task_options == {"text": "a=b"}


def test_what_is_written_reads_back_the_same(file, tmp_path):
    settings = load(file, ["pipeline.split=[4,2]", "task_options.hidden=8"])
    copy = tmp_path / "copy.toml"
    copy.write_text(settings.to_toml())
    assert load(copy) == settings


def test_an_unknown_key_is_told_with_the_known_ones(file):
    text = refusal(file, "batch.siez=3")
    assert "batch.siez" in text
    assert "micro_batch, size" in text


def test_an_unknown_section(file):
    assert "unknown setting batsh" in refusal(file, "batsh.size=3")


def test_a_wrong_type(file):
    assert "batch.size='many'" in refusal(file, "batch.size=many")


@pytest.mark.parametrize("override", ["batch.size=0", "grid.stages=-1", "optimizer.learning_rate=0"])
def test_a_number_out_of_range(file, override):
    assert override.split("=")[0] in refusal(file, override)


def test_a_micro_batch_larger_than_the_batch_is_told_with_both(file):
    text = refusal(file, "batch.size=4", "batch.micro_batch=8")
    assert "batch.micro_batch=8" in text
    assert "batch.size=4" in text


@pytest.mark.parametrize("other", ["gradients.local_steps=4", "gradients.compression=powersgd"])
def test_a_sharded_optimizer_needs_whole_sums_every_step(file, other):
    text = refusal(file, "optimizer.sharded=true", other)
    assert "optimizer.sharded=true" in text
    assert other in text
    load(file, ["optimizer.sharded=true"])
    load(file, [other])


@pytest.mark.parametrize(
    ("other", "fix"),
    [
        ("gradients.wire=fp16", "set it to fp32"),
        ("gradients.compression=powersgd", "set it to none"),
        ("gradients.tune=true", "set it to false"),
    ],
)
def test_local_steps_send_no_gradients_that_could_be_made_smaller(file, other, fix):
    text = refusal(file, "gradients.local_steps=8", other)
    assert other in text
    assert "gradients.local_steps=8" in text
    assert fix in text
    load(file, ["gradients.local_steps=8"])
    load(file, ["gradients.local_steps=1", other])


def test_a_file_that_is_not_there(tmp_path):
    assert "no such file" in refusal(tmp_path / "none.toml")


def test_a_file_that_is_not_toml(tmp_path):
    path = tmp_path / "x.toml"
    path.write_text("task = ")
    assert "not TOML" in refusal(path)


def test_a_missing_task(tmp_path):
    path = tmp_path / "x.toml"
    path.write_text("seed = 1")
    assert "setting task is missing" in refusal(path)


@pytest.mark.parametrize("text", ["batch.size", "=3", "batch..size=3"])
def test_an_override_without_its_form(file, text):
    assert "section.key=value" in refusal(file, text)


def test_an_override_below_a_value(file):
    assert "not a section" in refusal(file, "task.name=3")


@pytest.mark.parametrize(
    ("text", "expected"), [("4MiB", 4 * 2**20), ("64 kB", 64_000), (17, 17), ("0.5GiB", 2**29)]
)
def test_sizes(text, expected):
    assert parse_bytes(text) == expected


def test_a_size_that_is_none():
    with pytest.raises(ValueError, match="4 parsecs"):
        parse_bytes("4 parsecs")
