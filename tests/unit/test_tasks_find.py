"""Finding a task by its name and checking its options."""

import importlib
import pickle
import sys
from pathlib import Path

import pytest

from hpc_train.errors import UserError
from hpc_train.tasks.bytelm import ByteLM
from hpc_train.tasks.find import load_task
from hpc_train.tasks.task import Task

MY_TASK = """
from hpc_train.tasks.task import Task

class Mine(Task):
    def __init__(self, width: int, names: tuple[str, ...] = ("a",)):
        self.width, self.names = width, names

class Free(Task):
    def __init__(self, **anything):
        self.anything = anything

class NotATask:
    pass

number = 3
"""


@pytest.fixture(autouse=True)
def _python_as_before(monkeypatch, tmp_path):
    """Each test has a sys.path, sys.modules and working directory of its own."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "folder" / "file_of_mine.py"
    path.parent.mkdir()
    path.write_text(MY_TASK)
    return path


def test_a_built_in_task_with_options():
    task = load_task("bytelm", {"hidden": 64, "heads": 2})
    assert isinstance(task, ByteLM)
    assert (task.hidden, task.heads, task.blocks) == (64, 2, 4)


def test_a_class_in_a_file_found_relative_to_the_current_directory(file):
    task = load_task("folder/file_of_mine.py:Mine", {"width": 3, "names": ["x", "y"]})
    assert isinstance(task, Task)
    assert (task.width, task.names) == (3, ("x", "y"))


def test_a_task_from_a_file_can_be_imported_by_name_as_workers_do(file):
    cls = type(load_task(f"{file}:Free", {"any": 1}))
    assert cls.__module__ == "file_of_mine"
    assert pickle.loads(pickle.dumps(cls)) is cls
    assert str(file.parent) in sys.path  # which worker processes take over


def test_the_same_file_twice_is_one_module(file):
    assert type(load_task(f"{file}:Free", {})) is type(load_task("folder/../folder/file_of_mine.py:Free", {}))


def test_a_file_may_import_its_neighbours(file):
    file.with_name("neighbour_of_mine.py").write_text("width = 5")
    file.write_text(MY_TASK + "from neighbour_of_mine import width\nMine.width_there = width")
    assert load_task(f"{file}:Mine", {"width": 3}).width_there == 5


def test_a_class_in_a_package_of_the_current_directory(file):
    assert load_task("folder.file_of_mine:Mine", {"width": 2}).width == 2


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("bitelm", {}, "task='bitelm' is unknown: built in are bytelm, digits, regression, translate;"),
        ("bytelm", {"hiden": 3}, "unknown option task_options.hiden: known are blocks, context"),
        ("bytelm", {"hidden": "wide"}, "task_options.hidden='wide': input should be a valid integer"),
        ("bytelm", {"context": 0}, "task_options.context=0: input should be greater than 0"),
        ("bytelm", {"hidden": 130}, "hidden=130 cannot be divided among heads=4: set heads=2, or hidden=132"),
        ("bytelm", {"dropout": 1.0}, "dropout=1.0 drops everything"),
        ("digits", {"channels": 20}, "channels=20 is not a multiple of 8: set 24"),
        ("folder/file_of_mine.py:Mine", {}, "task_options.width is missing"),
        ("folder/file_of_mine.py:Min", {}, "has no 'Min': its tasks are Mine, Free"),
        ("folder/file_of_mine.py:NotATask", {}, "NotATask is not a Task"),
        ("folder/file_of_mine.py:number", {}, "number is not a Task"),
        ("folder/other.py:Mine", {}, "other.py: no such file"),
        ("folder.other:Mine", {}, "there is no module 'folder.other', neither installed nor in"),
        ("nowhere.file:Mine", {}, "there is no module 'nowhere', neither installed nor in"),
    ],
)
def test_a_mistake_is_told_in_one_line(file, name, options, message):
    with pytest.raises(UserError) as caught:
        load_task(name, options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("stem", "message"),
    [
        ("numpy", "the module 'numpy' exists already"),
        ("calendar", "the module 'calendar' exists already"),
        ("sys", "the module 'sys' exists already"),
        ("my-task", "'my-task' cannot be imported: rename it"),
    ],
)
def test_a_file_named_like_another_module_is_refused(file, stem, message):
    path = file.with_name(f"{stem}.py")
    path.write_text(MY_TASK)
    with pytest.raises(UserError, match=message):
        load_task(f"{path}:Mine", {"width": 1})
    assert str(path.parent) not in sys.path


def test_two_files_of_one_name_are_refused(file):
    load_task(f"{file}:Free", {})
    twin = file.parent / "deeper" / file.name
    twin.parent.mkdir()
    twin.write_text(MY_TASK)
    with pytest.raises(UserError, match=r"'file_of_mine' exists already .*rename your file"):
        load_task(f"{twin}:Free", {})


def test_what_a_file_itself_raises_comes_through(file):
    file.write_text("import a_module_that_is_nowhere")
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_nowhere"):
        load_task(f"{file}:Mine", {})
    importlib.invalidate_caches()
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_nowhere"):
        load_task("folder.file_of_mine:Mine", {})


def test_a_type_that_cannot_be_checked_is_left_to_the_class(file):
    file.write_text(
        "from hpc_train.tasks.task import Task\n"
        "class Odd: pass\n"
        "class Mine(Task):\n"
        "    def __init__(self, odd: Odd): self.odd = odd\n"
    )
    assert load_task(f"{file}:Mine", {"odd": 7}).odd == 7
