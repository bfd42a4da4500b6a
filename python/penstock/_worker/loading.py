"""Finds the app that a worker runs, and imports the modules with its tasks."""

from __future__ import annotations

import importlib
import os
import re
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock._values.shapes import module_name

if TYPE_CHECKING:
    from penstock._tasks.app import App


class Loaded(NamedTuple):
    """App with its full location, ``module:app``."""

    place: str
    app: App


class LoadError(Exception):
    """The app cannot be loaded; the message says why, without a traceback."""


def load_all(places: Iterable[str], modules: Iterable[str] = ()) -> list[Loaded]:
    """Import the app at each of these locations, then these modules, for one worker that runs all of their tasks.

    Raises ``LoadError`` if there is no such app or module.
    """
    loaded = list({id(each.app): each for each in map(load, places)}.values())
    for module in modules:
        _import(module)
    return loaded


def refuse_unsuitable(loaded: list[Loaded]) -> None:
    """Raise ``LoadError`` if an app has no tasks, or if two apps have different brokers or tasks of the same name."""
    first = loaded[0]
    tasks: dict[str, Loaded] = {}
    for each in loaded:
        _refuse_without_tasks(*each)
        if each.app._given_url != first.app._given_url:
            raise LoadError(
                f"{first.place} and {each.place} have different brokers ({first.app.url} and {each.app.url}), and a"
                " worker has one: run a worker for each of them"
            )
        for task in each.app.tasks:
            other = tasks.setdefault(task, each)
            if other is not each:
                raise LoadError(
                    f"{other.place} and {each.place} both have a task {task!r}: give one another name, or run a worker"
                    " for each of them, on queues of their own"
                )


def load(place: str) -> Loaded:
    """Import the app at ``module:app``, or the one app of ``module``, then the modules that it includes."""
    module, _, name = place.partition(":")
    is_path = "/" in module or module.startswith(".") or os.path.isfile(module)
    if os.path.isfile(module) and re.fullmatch(r"(\./)?([^\W\d]\w*/)*[^\W\d]\w*\.py", module):
        meant = module.removeprefix("./").removesuffix(".py").replace("/", ".")
        raise LoadError(f"{module!r} is a file, not a module; did you mean {meant}:{name or 'app'}?")
    if not module or place.endswith(":") or is_path:
        raise LoadError(
            f"{place!r} does not name an app: write module:app, for instance shop.tasks:app, which is in shop/tasks.py"
        )
    home = _import(module)
    app = _named(home, module, name) if name else None
    if app is None:
        name, app = _only_app(home, module)
    for included in app.include:
        _import(included)
    return Loaded(f"{module}:{name}", app)


def _refuse_without_tasks(place: str, app: App) -> None:
    """Raise ``LoadError`` if the app has no tasks, because the modules with its tasks were not imported."""
    if not app.tasks:
        package = place.partition(":")[0].partition(".")[0]
        raise LoadError(
            f"the app {app.name!r} has no tasks, so there is nothing to run: name the modules that have them, with "
            f'App({app.name!r}, include=["{package}.tasks"]) or `penstock worker {place} -I {package}.tasks`'
        )


def report_of(loaded: list[Loaded]) -> dict[str, Any]:
    """Return the report on the apps for the supervisor."""
    tasks = {name: task for each in loaded for name, task in each.app.tasks.items()}
    started_ms = time.time_ns() // 1_000_000
    modules = Counter(module_name(task.function.__module__) for task in tasks.values())
    return {
        "app": ", ".join(each.app.name for each in loaded),
        "place": ", ".join(each.place for each in loaded),
        "url": loaded[0].app._given_url,
        "queues": sorted({task._options.queue for task in tasks.values()}),
        "tasks": sorted((name, task.slot or ("async" if task.is_async else "")) for name, task in tasks.items()),
        "modules": sorted(modules.items()),
        "schedules": [text for each in loaded for text in each.app._declarations(started_ms)],
    }


def explain(place: str, error: BaseException) -> str:
    """Explain why the app cannot be loaded, with the frames of the user's own code."""
    if isinstance(error, LoadError):
        return f"cannot load {place}: {error}"
    # Frames of Penstock and of the import system do not help.
    ours = {os.path.join(os.path.dirname(__file__), name) for name in ("loading.py", "zygote.py")}
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename not in ours and "importlib" not in frame.filename
    ]
    lines = traceback.format_list(frames) + traceback.format_exception_only(error)
    return f"cannot load {place}:\nTraceback (most recent call last):\n{''.join(lines)}".rstrip()


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise LoadError(f"there is no module {error.name!r} here ({os.getcwd()}) or among the packages") from None


def _named(home: ModuleType, module: str, name: str) -> App:
    from penstock._tasks.app import App

    found: object = home
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            apps = _apps(home)
            hint = f"; it has {', '.join(f'{module}:{name}' for name in apps)}" if apps else ""
            raise LoadError(f"the module {module!r} has no {name!r}{hint}") from None
    if not isinstance(found, App):
        raise LoadError(f"'{module}:{name}' is a {type(found).__name__}, not a penstock.App")
    return found


def _only_app(home: ModuleType, module: str) -> tuple[str, App]:
    apps = _apps(home)
    if len({id(app) for app in apps.values()}) == 1:
        return next(iter(apps.items()))
    if apps:
        several = ", ".join(f"{module}:{name}" for name in apps)
        raise LoadError(f"the module {module!r} has several apps; name one: {several}")
    raise LoadError(
        f"the module {module!r} has no penstock.App; name where it is as module:app, for instance {module}.tasks:app"
    )


def _apps(home: ModuleType) -> dict[str, App]:
    from penstock._tasks.app import App

    return {name: value for name, value in vars(home).items() if isinstance(value, App)}
