"""What a person sees while training runs: a bar where there is a terminal, plain lines where not."""

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichBar
from rich.table import Column

LINE_EVERY_S = 5.0
_LAUNCHERS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")


def terminal_columns(environ: Mapping[str, str] = os.environ) -> int:
    """The width of the terminal that shows this rank's output; 0 where none does.

    Open MPI gives every rank a pseudo-terminal whatever becomes of its output, so that `isatty` lies
    there: our launcher says the truth in HPC_TRAIN_TERMINAL, and else the launcher's own output tells.
    """
    if environ.get("TERM") in ("dumb", "unknown"):
        return 0  # nothing can be drawn over there: a bar would show only when it ends
    if "HPC_TRAIN_TERMINAL" in environ:
        text = environ["HPC_TRAIN_TERMINAL"]
        return int(text) if text.isdigit() else 0
    if any(name in environ for name in _LAUNCHERS):
        try:
            parent = os.readlink(Path("/proc") / str(os.getppid()) / "fd" / "1")
        except OSError:  # no /proc, or another user's process: lines are safe everywhere
            return 0
        shown = parent.startswith(("/dev/pts/", "/dev/tty"))
        return Console(stderr=False).width if shown else 0
    return Console().width if sys.stdout.isatty() else 0


class Bar(RichBar):
    """A bar and an empty line: Open MPI passes output on by whole lines, and would hold a bar alone back."""

    def get_renderable(self) -> RenderableType:
        """The bar, and the line that lets it through."""
        return Group(super().get_renderable(), "")


class Progress:
    """Shows the steps of a run.  Only the rank whose `shown` is true prints anything.

    Args:
        total: steps of the whole run.
        columns: width of the terminal, 0 for plain lines; by default found out.
    """

    def __init__(self, total: int, shown: bool, columns: int | None = None) -> None:
        self._total = total
        self._shown = shown
        width = terminal_columns() if columns is None else columns
        self._console = Console(
            file=sys.stdout,
            force_terminal=width > 0,
            width=width or None,
            soft_wrap=True,
            highlight=False,
            emoji=False,  # texts hold paths, and `:x:` is one
        )
        self._bar: Bar | None = None
        if shown and width > 0:
            counter = 2 * len(str(total)) + 1
            self._bar = Bar(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                # cut where the terminal is narrow, so that the other columns keep theirs
                TextColumn(
                    "{task.fields[text]}",
                    table_column=Column(no_wrap=True, max_width=max(10, width - counter - 25)),
                ),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._bar.add_task("step", total=total, text="")
        self._last_line_s = -LINE_EVERY_S

    def step(self, line: Mapping[str, Any]) -> None:
        """Show a finished step: a line of metrics."""
        if not self._shown:
            return
        text = (
            f"loss {line['loss']:.4f}  {line['samples_per_s']:,.0f} samples/s  "
            f"grad norm {line['grad_norm']:.3g}  lr {line['learning_rate']:.2e}"
        )
        if line.get("hidden_share") is not None:
            text += f"  sums {line['hidden_share']:.0%} hidden"
        skipped = line.get("skipped", False)
        if skipped:
            text += "  skipped: not finite"
        if self._bar is not None:
            if skipped:
                self.note(f"step {line['step']} was skipped: its loss or gradients are not finite")
            self._bar.update(self._task, completed=line["step"], text=text)
        elif time.monotonic() - self._last_line_s >= LINE_EVERY_S or line["step"] == self._total or skipped:
            self._last_line_s = time.monotonic()
            self.note(f"step {line['step']:>{len(str(self._total))}}/{self._total}  {text}")

    def note(self, text: str) -> None:
        """Say something, above the bar if there is one."""
        if self._shown:
            self._console.print(text, markup=False, soft_wrap=True)
            self._console.file.flush()

    def __enter__(self) -> "Progress":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
