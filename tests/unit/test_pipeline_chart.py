"""The Gantt chart of a simulation."""

import sys

import pytest

from hpc_train.errors import UserError
from hpc_train.pipeline.chart import save_chart
from hpc_train.pipeline.schedules import find, one_f_one_b, zb_v
from hpc_train.pipeline.simulate import simulate


def svg(tmp_path, order, title="a schedule", times=(0.01, 0.01, 0.01)):
    """The chart as text, in which words stand as they are."""
    matplotlib = pytest.importorskip("matplotlib")
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        save_chart(tmp_path / "a.svg", simulate(order, *times), title)
    return (tmp_path / "a.svg").read_text()


def test_what_a_person_reads(tmp_path):
    text = svg(tmp_path, zb_v(2, 4), "zb-v, 2 stages, 4 micro-batches")
    assert "zb-v, 2 stages, 4 micro-batches: step 250 ms, bubble 4.0%" in text
    for words in ("stage 0", "stage 1", "forward (F)", "backward (B)", "idle", "ms"):
        assert f">{words}</text>" in text
    for words in ("for the input (I)", "for the weights (W)", "the lighter, the later a stage"):
        assert words in text
    # 4 chunks x F, I, W, but a whole backward for chunk 0; each cell has its micro-batch's number
    assert [text.count(f">{number}</text>") for number in (1, 2, 3)] == [11, 11, 11]


def test_a_legend_names_only_what_is_there(tmp_path):
    text = svg(tmp_path, one_f_one_b(1, 2), times=(2e-7, 1e-7, 1e-7))
    assert "step 0.8 µs, bubble 0.0%" in text
    for words in ("idle", "(I)", "(W)", "lighter"):
        assert words not in text


def test_a_long_order_shows_beginning_and_end(tmp_path):
    text = svg(tmp_path, one_f_one_b(2, 300))
    assert "beginning and end" in text
    assert ">0</text>" in text
    assert ">299</text>" in text
    assert ">150</text>" not in text


@pytest.mark.parametrize(("name", "stages", "micro_batches"), [("1f1b", 4, 8), ("interleaved", 40, 80)])
def test_a_picture(tmp_path, name, stages, micro_batches):
    pytest.importorskip("matplotlib")
    save_chart(tmp_path / "a.png", simulate(find(name).order(stages, micro_batches), 1, 1, 1), name)
    head = (tmp_path / "a.png").read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big")
    assert 900 < width < 3000
    assert 300 < height < 3000


@pytest.mark.parametrize("path", ["none/a.png", "a.docx"])
def test_files_that_cannot_be_written(tmp_path, path):
    pytest.importorskip("matplotlib")
    with pytest.raises(UserError, match=r"cannot write the chart .*a\."):
        save_chart(tmp_path / path, simulate(one_f_one_b(2, 2), 1, 1, 1), "1f1b")


def test_matplotlib_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r"a chart needs matplotlib.*pip install 'hpc_train\[report\]'"):
        save_chart(tmp_path / "a.png", simulate(one_f_one_b(2, 2), 1, 1, 1), "1f1b")
