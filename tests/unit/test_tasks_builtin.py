"""The built-in tasks: shapes, losses by sample, data without overlap, and that they learn."""

import math

import pytest
import torch

from hpc_train.errors import UserError
from hpc_train.pipeline.layers import count_parameters
from hpc_train.tasks.bytelm import ByteLM, ByteWindows, python_help, read_text
from hpc_train.tasks.digits import Digits
from hpc_train.tasks.find import load_task
from hpc_train.tasks.regression import Regression
from hpc_train.tasks.task import Task

SMALL_TEXT = {"hidden": 16, "blocks": 2, "heads": 2, "context": 12}
TASKS = [
    pytest.param("bytelm", SMALL_TEXT, id="bytelm"),
    pytest.param("digits", {"channels": 8}, id="digits"),
    pytest.param("regression", {"samples": 64}, id="regression"),
]


def first_samples(task: Task, count: int, split: str = "train") -> tuple[torch.Tensor, torch.Tensor]:
    dataset = task.dataset(split)
    samples = [dataset[index] for index in range(count)]
    return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])


@pytest.mark.parametrize(("name", "options"), TASKS)
def test_loss_and_metrics_are_one_figure_a_sample(name, options):
    task = load_task(name, options)
    inputs, target = first_samples(task, 3)
    output = task.plain_model()(inputs)
    figures = {"loss": task.loss(output, target), **task.metrics(output, target)}
    assert {figure.shape for figure in figures.values()} == {(3,)}
    assert all(torch.isfinite(figure).all() for figure in figures.values())


@pytest.mark.parametrize(("name", "options"), TASKS)
def test_a_sample_does_not_depend_on_its_neighbours(name, options):
    """Or else a batch could not be cut into micro-batches without changing the update."""
    task = load_task(name, options)
    model = task.plain_model()
    inputs, _ = first_samples(task, 5)
    apart = torch.cat([model(inputs[:2]), model(inputs[2:])])
    torch.testing.assert_close(model(inputs), apart, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "options"), TASKS)
def test_every_layer_has_parameters_and_a_title(name, options):
    specs = load_task(name, options).layers()
    assert all(spec.title and count_parameters(spec) > 0 for spec in specs)
    assert len({spec.title for spec in specs}) == len(specs)


@pytest.mark.parametrize(("name", "options"), TASKS)
def test_splits_share_no_sample(name, options):
    task = load_task(name, options)
    train, held_out = task.dataset("train"), task.dataset("eval")
    assert len(train) > len(held_out) > 0
    if name == "bytelm":
        joined = torch.cat([train.text, held_out.text])
        assert bytes(joined.tolist()) == python_help()
    else:
        images = {tuple(train[i][0].flatten().tolist()) for i in range(len(train))}
        held = {tuple(held_out[i][0].flatten().tolist()) for i in range(len(held_out))}
        assert not images & held


def train(task: Task, steps: int, rate: float, batch: int = 32) -> tuple[float, float]:
    """First and last loss of plain training."""
    torch.manual_seed(0)
    model, dataset = task.plain_model(), task.dataset("train")
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    losses = []
    for step in range(steps):
        samples = [dataset[(step * batch + i) % len(dataset)] for i in range(batch)]
        inputs, target = (torch.stack(part) for part in zip(*samples, strict=True))
        optimizer.zero_grad()
        loss = task.loss(model(inputs), target).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[0], losses[-1]


def test_bytelm_begins_at_a_uniform_guess_and_learns():
    first, last = train(ByteLM(**SMALL_TEXT), steps=40, rate=1e-2)
    assert first == pytest.approx(math.log(256), abs=0.1)
    assert last < 3.3


def test_digits_learns_to_tell_held_out_images_apart():
    task = Digits(channels=16)
    torch.manual_seed(0)
    model, dataset = task.plain_model(), task.dataset("train")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(80):
        samples = [dataset[(step * 64 + i) % len(dataset)] for i in range(64)]
        inputs, target = (torch.stack(part) for part in zip(*samples, strict=True))
        optimizer.zero_grad()
        task.loss(model(inputs), target).mean().backward()
        optimizer.step()
    inputs, target = first_samples(task, len(task.dataset("eval")), "eval")
    assert task.metrics(model(inputs), target)["accuracy"].mean() > 0.9


def test_regression_learns():
    first, last = train(Regression(samples=512), steps=120, rate=3e-3)
    assert last < first / 3


def test_windows_ask_for_every_byte_once():
    windows = ByteWindows(torch.arange(23, dtype=torch.uint8), context=5)
    inputs, targets = zip(*(windows[i] for i in range(len(windows))), strict=True)
    assert torch.cat(targets).tolist() == list(range(1, 21))  # 21, 22 do not fill a window
    assert torch.cat(inputs).tolist() == list(range(20))
    with pytest.raises(IndexError):
        windows[4]


@pytest.mark.parametrize(("num_bytes", "count"), [(0, 0), (1, 0), (5, 0), (6, 1), (10, 1), (11, 2)])
def test_a_window_needs_one_byte_more_than_the_context(num_bytes, count):
    assert len(ByteWindows(torch.zeros(num_bytes, dtype=torch.uint8), context=5)) == count


def test_attention_is_causal():
    task = ByteLM(**SMALL_TEXT)
    model = task.plain_model()
    inputs, _ = first_samples(task, 1)
    changed = inputs.clone()
    changed[0, 7:] = 65
    torch.testing.assert_close(model(inputs)[:, :7], model(changed)[:, :7])
    assert not torch.equal(model(inputs)[:, 7:], model(changed)[:, 7:])


def test_dropout_is_for_training_only():
    model = ByteLM(**SMALL_TEXT, dropout=0.5).plain_model()
    inputs = torch.full((1, 12), 65)
    assert not torch.equal(model(inputs), model(inputs))
    model.eval()
    assert torch.equal(model(inputs), model(inputs))


def test_bits_a_byte_are_the_loss_in_base_two():
    task = ByteLM(**SMALL_TEXT)
    target = torch.tensor([[3, 200], [7, 7]])
    output = torch.full((2, 2, 256), 0.0)
    assert task.metrics(output, target)["bits_per_byte"].tolist() == pytest.approx([8.0, 8.0], rel=1e-5)
    output[0, 0, 3] = output[0, 1, 200] = output[1, 0, 7] = 9.0
    assert task.metrics(output, target)["accuracy"].tolist() == [1.0, 0.5]


def test_text_from_a_folder_is_joined_by_name_without_hidden_and_binary_files(tmp_path):
    for name, data in {"b.txt": b"second", "a/x.md": b"first", ".git/c": b"hidden", "d.png": b"\0\1"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    assert read_text(tmp_path) == b"first\n\nsecond"
    assert read_text(tmp_path / "b.txt") == b"second"


def test_a_text_that_is_not_there_or_too_short_is_told(tmp_path):
    with pytest.raises(UserError, match="no such file or folder"):
        ByteLM(text=str(tmp_path / "none.txt")).dataset("train")
    (tmp_path / "d.png").write_bytes(b"\0")
    with pytest.raises(UserError, match="no text among the 1 files"):
        ByteLM(text=str(tmp_path)).dataset("train")
    (tmp_path / "short.txt").write_bytes(b"x" * 300)
    with pytest.raises(UserError, match=r"300 bytes, too few for context=128: bring 1290, or .* at most 29"):
        ByteLM(text=str(tmp_path / "short.txt")).dataset("eval")
    (tmp_path / "empty.txt").write_bytes(b"")
    with pytest.raises(UserError, match="0 bytes, too few"):
        ByteLM(text=str(tmp_path / "empty.txt")).dataset("train")


@pytest.mark.parametrize(("num_bytes", "context"), [(1290, 128), (300, 29)])
def test_the_fix_that_the_message_names_works(tmp_path, num_bytes, context):
    (tmp_path / "short.txt").write_bytes(b"x" * num_bytes)
    assert len(ByteLM(text=str(tmp_path / "short.txt"), context=context).dataset("eval")) == 1


def test_sample_continues_the_prompt_and_is_the_same_each_time():
    task = ByteLM(**SMALL_TEXT, prompt="Python", sample_bytes=30)
    model = task.plain_model().eval()
    seen = []

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        seen.append(inputs.shape)
        with torch.no_grad():
            return model(inputs)

    text = task.sample(forward)
    torch.rand(3)  # whatever others draw
    assert text == task.sample(forward)
    assert text.startswith("Python")
    assert seen[0] == (1, 6)
    assert max(seen) == (1, 12)  # never more than the context
