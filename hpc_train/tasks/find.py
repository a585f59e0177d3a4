"""From the setting `task` and its options to a Task.

bytelm                  built-in
path/file.py:MyTask     a class in the user's own file
package.module:MyTask   a class in a module that is installed, or lies in the current directory
"""

import importlib
import importlib.util
import inspect
import sys
import typing
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from hpc_train.errors import UserError
from hpc_train.tasks.task import Task

BUILT_IN = {
    "bytelm": "hpc_train.tasks.bytelm:ByteLM",
    "digits": "hpc_train.tasks.digits:Digits",
    "regression": "hpc_train.tasks.regression:Regression",
    "translate": "hpc_train.tasks.translate:Translate",
}


def load_task(name: str, options: Mapping[str, Any]) -> Task:
    """The task called `name`, made with `options` as its constructor's keyword arguments.

    Options are checked against the constructor's type hints; whatever the file or the constructor
    itself raises comes through with its traceback.

    Raises:
        UserError: there is no such task, or an option is unknown, missing or of the wrong type.
    """
    cls = _find_class(BUILT_IN.get(name, name))
    return cls(**_check_options(name, cls, options))


def _find_class(name: str) -> type[Task]:
    place, colon, class_name = name.rpartition(":")
    if not colon:
        raise UserError(
            f"task={name!r} is unknown: built in are {', '.join(BUILT_IN)}; "
            "your own is written path/file.py:MyTask or package.module:MyTask"
        )
    module = _import_file(Path(place)) if place.endswith(".py") else _import_module(place)
    cls = getattr(module, class_name, None)
    if cls is None:
        tasks = [
            n
            for n, c in vars(module).items()
            if isinstance(c, type) and issubclass(c, Task) and c is not Task
        ]
        found = f"its tasks are {', '.join(tasks)}" if tasks else "no class there is a Task"
        raise UserError(f"task={name!r}: {place} has no {class_name!r}: {found}")
    if not (isinstance(cls, type) and issubclass(cls, Task)):
        raise UserError(
            f"task={name!r}: {class_name} is not a Task: write class {class_name}(hpc_train.Task)"
        )
    return cls


def _import_file(path: Path) -> ModuleType:
    """Import a file by its stem, from its folder, as `python path/file.py` would find it.

    Not by its path alone: worker processes that unpickle its classes import it by name again.
    """
    path = path.resolve()
    if not path.is_file():
        raise UserError(f"task file {path}: no such file")
    stem, folder = path.stem, str(path.parent)
    if not stem.isidentifier():
        raise UserError(f"task file {path}: {stem!r} cannot be imported: rename it, for instance my_task.py")
    if stem in sys.modules:
        other = getattr(sys.modules[stem], "__file__", None) or "a part of Python"
    else:
        spec = importlib.util.find_spec(stem)
        other = (spec.origin or str(spec.submodule_search_locations)) if spec else str(path)
    if stem in sys.stdlib_module_names or Path(other).resolve() != path:
        raise UserError(f"task file {path}: the module {stem!r} exists already ({other}): rename your file")
    if folder not in sys.path:
        sys.path.insert(0, folder)
        importlib.invalidate_caches()
    return importlib.import_module(stem)


def _import_module(name: str) -> ModuleType:
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # last: nothing that is installed gets hidden
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and f"{name}.".startswith(f"{error.name}."):  # not one that it imports itself
            raise UserError(
                f"task module {name!r}: there is no module {error.name!r}, neither installed nor in "
                f"{Path.cwd()}; a file is written path/file.py:MyTask"
            ) from None
        raise


def _check_options(name: str, cls: type[Task], options: Mapping[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(cls).parameters
    hints = typing.get_type_hints(cls.__init__, include_extras=True)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    known = {n: p for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    missing = [n for n, p in known.items() if p.default is p.empty and n not in options]
    if missing:
        raise UserError(f"task {name}: task_options.{missing[0]} is missing: set it")
    checked = {}
    for option, value in options.items():
        if option not in known and not takes_any:
            names = f"known are {', '.join(sorted(known))}" if known else "it takes none"
            raise UserError(f"task {name}: unknown option task_options.{option}: {names}")
        checked[option] = _check(option, value, hints.get(option, Any))
    return checked


def _check(option: str, value: Any, hint: Any) -> Any:
    try:
        return TypeAdapter(hint).validate_python(value)
    except PydanticUserError:  # a hint that pydantic has no rule for; the class itself must judge
        return value
    except ValidationError as error:
        text = error.errors()[0]["msg"]
        raise UserError(f"task_options.{option}={value!r}: {text[0].lower()}{text[1:]}") from None
