"""A simulation as a Gantt chart in a file, for slides and papers.  PURE: neither torch nor MPI."""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hpc_train.errors import UserError
from hpc_train.pipeline.actions import Kind, count_micro_batches, placement
from hpc_train.pipeline.simulate import Simulation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = {Kind.F: "#2f6db3", Kind.B: "#a8433a", Kind.I: "#d98a2b", Kind.W: "#3c8d5a"}
_WORDS = {Kind.F: "forward (F)", Kind.B: "backward (B)", Kind.I: "backward for the input (I)"}
_WORDS[Kind.W] = "backward for the weights (W)"
_IDLE = "#e6e6e6"
_LONGEST_ROW = 120  # cells whose numbers can be read; of longer rows the beginning and the end are shown
_PANEL_CELLS = 50  # about as many does either of the two show, or more, so that all stages have begun


class _Scale(NamedTuple):
    """Seconds in the unit of the axis."""

    unit: str
    per_s: float


def save_chart(path: str | Path, simulation: Simulation, title: str) -> None:
    """Write a chart with a row for each stage: what it does in colours, when it is idle in grey.

    Micro-batches' numbers stand in the cells that have room for any of them. Of long orders the beginning
    and the end are shown.

    Args:
        path: its ending says the format: .png, .svg or .pdf.
        simulation: of an order in which there is something to do.
        title: goes before step time and bubble.

    Raises:
        UserError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(
            "a chart needs matplotlib, which is not installed: pip install 'hpc_train[report]'"
        ) from None
    stages, step_s = len(simulation.order), simulation.step_s
    longest = max(map(len, simulation.order))
    panel_cells = max(_PANEL_CELLS, 4 * stages)
    spans, cells_shown = [(0.0, step_s)], longest
    if longest > max(_LONGEST_ROW, 2 * panel_cells):
        shown_s = step_s * panel_cells / longest
        spans, cells_shown = [(0.0, shown_s), (step_s - shown_s, step_s)], 2 * panel_cells
    row_height = min(0.42, max(0.09, 14 / stages))  # inches
    width = min(26.0, max(9.0, 2 + 0.3 * cells_shown))
    figure = Figure(figsize=(width, 1.8 + row_height * stages), dpi=110, layout="constrained")
    panels = figure.subplots(1, len(spans), sharey=True, squeeze=False)[0]
    scale = _scale(step_s)
    for panel, (begin_s, end_s) in zip(panels, spans, strict=True):
        points_per_s = 72 * (width - 1.2) / len(spans) / (end_s - begin_s)  # nearly all of the width
        _draw_cells(panel, simulation, (begin_s, end_s), scale, points_per_s, 72 * row_height)
        panel.set_xlim(begin_s * scale.per_s, end_s * scale.per_s)
        panel.set_xlabel(scale.unit)
        panel.tick_params(axis="y", length=0)
        panel.spines[["top", "right", "left"]].set_visible(False)
    every = max(1, round(0.14 / row_height))
    panels[0].set_ylim(stages - 0.5, -0.5)
    panels[0].set_yticks(range(0, stages, every), [f"stage {stage}" for stage in range(0, stages, every)])
    _draw_legend(figure, simulation)
    shown = ", beginning and end" if len(spans) > 1 else ""
    step = f"{step_s * scale.per_s:.4g} {scale.unit}"
    figure.suptitle(f"{title}: step {step}, bubble {simulation.bubble:.1%}{shown}")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write the chart {path}: {error}") from None


def _draw_cells(
    panel: "Axes",
    simulation: Simulation,
    span_s: tuple[float, float],
    scale: _Scale,
    points_per_s: float,
    row_points: float,
) -> None:
    """The cells that reach into the span, each as a rectangle 0.8 rows high."""
    from matplotlib.collections import PolyCollection

    rectangles, colours = [], []
    begin_s, end_s = span_s
    font = min(9.0, 0.5 * row_points)
    shade = _shades(simulation)
    text_points = 0.6 * font * len(str(count_micro_batches(simulation.order) - 1)) + 2
    for stage, row in enumerate(simulation.cells):
        panel.barh(stage, (end_s - begin_s) * scale.per_s, 0.8, begin_s * scale.per_s, color=_IDLE, zorder=0)
        for (chunk, kind, micro_batch), start_s, stop_s in row:
            if stop_s <= begin_s or start_s >= end_s:
                continue
            left, right = start_s * scale.per_s, stop_s * scale.per_s
            top, bottom = stage - 0.4, stage + 0.4
            rectangles.append([(left, top), (right, top), (right, bottom), (left, bottom)])
            colours.append(_lighten(_COLOURS[kind], shade[chunk]))
            fits = (stop_s - start_s) * points_per_s >= text_points and font >= 4
            if fits and begin_s <= start_s and stop_s <= end_s:
                ink = "black" if shade[chunk] > 0.4 else "white"
                middle = (left + right) / 2
                panel.text(
                    middle, stage, str(micro_batch), ha="center", va="center", fontsize=font, color=ink
                )
    cell_points = simulation.step_s * points_per_s / max(map(len, simulation.order))
    edge = min(0.8, row_points / 16, cell_points / 12)
    panel.add_collection(PolyCollection(rectangles, facecolors=colours, edgecolors="white", linewidths=edge))


def _draw_legend(figure: "Figure", simulation: Simulation) -> None:
    from matplotlib.patches import Patch

    kinds = {action.kind for row in simulation.order for action in row}
    patches = [Patch(color=_COLOURS[kind], label=_WORDS[kind]) for kind in Kind if kind in kinds]
    if simulation.bubble > 0:
        patches.append(Patch(color=_IDLE, label="idle"))
    shade = _shades(simulation)
    if max(shade) > 0:
        lightest = _lighten(_COLOURS[Kind.F], max(shade))
        patches.append(Patch(color=lightest, label="the lighter, the later a stage's chunk"))
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False)


def _shades(simulation: Simulation) -> list[float]:
    """How light a chunk is drawn, 0..0.65: its place among those of its stage."""
    stage_of = placement(simulation.order)
    earlier = [stage_of[:chunk].count(stage) for chunk, stage in enumerate(stage_of)]
    return [0.65 * number / max(1, *earlier) for number in earlier]


def _lighten(colour: str, share: float) -> tuple[float, float, float]:
    """An RGB colour, 0..1, `share` of the way to white."""
    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    red, green, blue = (part + (1 - part) * share for part in parts)
    return red, green, blue


def _scale(step_s: float) -> _Scale:
    scales = (_Scale("s", 1.0), _Scale("ms", 1e3), _Scale("µs", 1e6))
    return next((scale for scale in scales if step_s * scale.per_s >= 1), scales[-1])
