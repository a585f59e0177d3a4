"""The rules of the house, read from the source: who may import whom, and what a file looks like.

cli -> training -> gradients, pipeline, planning, coordinator, data, checkpoint, observe
    -> comm.interface -> grid, config, errors, stopwatch
"""

import ast
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[2] / "hpc_train"
FILES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}

FLOOR = ("errors", "grid", "config", "stopwatch", "comm.interface")
# What a room may import beside itself, by the start of the name; the longest name that fits counts.
ROOMS = {
    "errors": (),
    "stopwatch": (),
    "grid": ("errors",),
    "config": ("errors",),
    "comm.interface": ("grid", "errors"),
    "launch": ("errors", "comm.interface"),
    "launch.horovod_settings": ("errors", "comm.interface", "config"),
    "comm": (*FLOOR, "launch.identity"),
    "gradients": FLOOR,
    # the entry of those who bring their own loop
    "gradients.session": (*FLOOR, "comm.connect", "launch.horovod_settings"),
    "pipeline": (*FLOOR, "comm.wire"),  # number formats, nothing that communicates
    "planning": (  # of pipeline what is PURE
        *FLOOR,
        *(
            "pipeline.actions",
            "pipeline.schedules",
            "pipeline.simulate",
            "pipeline.check",
            "pipeline.partition",
        ),
    ),
    "coordinator": FLOOR,
    "data": FLOOR,
    "checkpoint": FLOOR,
    "observe": FLOOR,
    "tasks": (*FLOOR, "pipeline.layers"),
    "bench": (*FLOOR, "launch", "comm.library_sum"),
    "training": (
        *FLOOR,
        *("gradients", "pipeline", "planning", "coordinator", "data", "checkpoint", "observe", "tasks"),
        *("launch.binding", "launch.signals"),
    ),
    "cli": ("",),
    "__main__": ("cli",),
    "__init__": ("",),
}
BACKENDS = ("comm.mpi", "comm.torch_dist", "comm.horovod", "comm.loopback")
HEAVY = ("torch", "mpi4py")


class Import(NamedTuple):
    """One import statement's module; `lazy`: inside a function; `typing`: for the type checker alone."""

    module: str
    lazy: bool
    typing: bool


def imports(name: str) -> list[Import]:
    found: list[Import] = []

    def walk(node: ast.AST, lazy: bool, typing: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, lazy, typing) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: write imports in full"
            module = str(node.module)
            for alias in node.names:  # `from hpc_train.comm import mpi_memory` imports a module
                inner = f"{module}.{alias.name}"
                found.append(
                    Import(inner if inner.removeprefix("hpc_train.") in FILES else module, lazy, typing)
                )
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for child in node.body:
                walk(child, lazy, True)
            for child in node.orelse:
                walk(child, lazy, typing)
            return
        inside = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.iter_child_nodes(node):
            walk(child, inside, typing)

    walk(ast.parse(FILES[name].read_text()), False, False)
    return found


def ours(name: str) -> list[Import]:
    """The imports of this package's own modules, without its name."""
    prefix = "hpc_train."
    return [i._replace(module=i.module[len(prefix) :]) for i in imports(name) if i.module.startswith(prefix)]


def is_in(name: str, room: str) -> bool:
    return room == "" or name == room or name.startswith(room + ".")


def room_of(name: str) -> str:
    return max((room for room in ROOMS if is_in(name, room)), key=len, default="")


def docstring(name: str) -> str:
    return ast.get_docstring(ast.parse(FILES[name].read_text())) or ""


PURE = [name for name in FILES if "PURE" in docstring(name)]


@pytest.mark.parametrize("name", FILES)
def test_imports_go_one_way(name):
    room = room_of(name)
    assert room, f"{name} is in no room: give it a line in ROOMS"
    allowed = (*ROOMS[room], name.split(".")[0] if room not in FLOOR else room)
    wrong = [i.module for i in ours(name) if not any(is_in(i.module, start) for start in allowed)]
    assert not wrong, f"{name} may import {', '.join(allowed)}, not {', '.join(wrong)}"


def test_the_rule_notices():
    """The checks above see lazy imports and those of modules from packages."""
    assert Import("comm.connect", lazy=True, typing=False) in ours("gradients.session")
    assert any(i.module == "mpi4py" and not i.lazy for i in imports("comm.mpi"))
    assert room_of("gradients.session") == "gradients.session"
    assert room_of("comm.mpi") == "comm"
    assert "grid" in PURE


def test_connect_alone_chooses_a_backend():
    importers = {name for name in FILES if any(i.module in BACKENDS and not i.typing for i in ours(name))}
    assert importers == {"comm.connect"}
    assert all(i.lazy or i.typing for i in ours("comm.connect") if i.module in BACKENDS)


@pytest.mark.parametrize("name", FILES)
def test_only_comm_and_launch_know_mpi(name):
    mine = [i for i in imports(name) if is_in(i.module, "mpi4py")]
    assert not mine or name.startswith(("comm.", "launch."))
    assert all(i.lazy for i in mine) or name.startswith("comm.")  # launch runs before MPI starts


@pytest.mark.parametrize("name", PURE)
def test_a_pure_file_imports_neither_torch_nor_mpi(name):
    assert not [i.module for i in imports(name) if i.module.split(".")[0] in HEAVY and not i.typing]


def test_pure_files_load_neither_torch_nor_mpi():
    program = "import sys, importlib\n"
    program += "".join(f"importlib.import_module('hpc_train.{name}')\n" for name in PURE)
    program += f"print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_the_rooms_that_must_be_pure_are():
    assert set(PURE) >= {
        "grid",
        *("pipeline.actions", "pipeline.schedules", "pipeline.schedule_file", "pipeline.check"),
        *("pipeline.simulate", "pipeline.drawing", "pipeline.chart", "pipeline.partition"),
        *(name for name in FILES if name.startswith(("coordinator.policies.", "planning."))),
        *("coordinator.report", "coordinator.plan", "launch.line", "launch.findings", "launch.identity"),
        "launch.horovod_settings",
    }


@pytest.mark.parametrize("name", FILES)
def test_a_file_says_its_duty_and_can_be_read_in_one_go(name):
    text = FILES[name].read_text()
    assert not text or docstring(name).split("\n")[0].strip()
    assert len(text.splitlines()) <= 400
    assert not {"utils", "manager", "helper", "helpers"} & set(name.split("."))


@pytest.mark.parametrize("path", sorted(PACKAGE.parent.glob("benchmarks/*/*.py")), ids=lambda path: path.stem)
def test_no_file_beside_a_script_hides_a_standard_module(path):
    # A script's directory comes first on sys.path: a profile.py there would be what `import profile` finds.
    assert path.stem not in sys.stdlib_module_names
