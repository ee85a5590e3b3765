"""Registries of methods, benchmarks and diagnostics: what the package offers, and what comes from a user's own file.

A registry finds its members by importing every module of one package, so a new member is one new file. Code from
outside the package comes in through ``--plugin FILE.py`` (every verb), the variable ``REALVR_PLUGINS`` (what processes
that a verb starts inherit), ``--method FILE.py:Class`` (training), or `Registry.add`. No torch here.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import os
import pkgutil
import sys
import threading
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from realvr.errors import UserError

T = TypeVar("T")
VARIABLE = "REALVR_PLUGINS"
_REGISTRIES: list[Registry[Any]] = []


class Registry(Generic[T]):
    """Subclasses of one base class, by their ``name``. Two of one name are refused when the second is added.

    ``kind`` is the word for messages ("benchmark"), ``package`` where the members live, ``required`` the attributes
    and functions that a member must define itself (those of the base do not count), ``check`` says what else is wrong
    with a member ('' where nothing is).
    """

    def __init__(
        self,
        kind: str,
        base: type[T],
        package: str,
        required: tuple[str, ...] = (),
        check: Callable[[type[T]], str] | None = None,
    ) -> None:
        self.kind, self.base, self.package, self.required, self.check = kind, base, package, required, check
        self._members: dict[str, type[T]] = {}
        self._lock = threading.RLock()
        self._filled = False
        _REGISTRIES.append(self)

    def add(self, member: type[T]) -> type[T]:
        """Register a class; usable as a decorator. The same class twice is once."""
        self._check(member)
        name = str(member.name)  # type: ignore[attr-defined]
        for known in self._members.values():
            if known is not member and (shared := _all_names(known) & _all_names(member)):
                raise UserError(
                    f"two {self.kind}s are called '{min(shared)}': {place_of(known)} and {place_of(member)}; rename one"
                )
        self._members[name] = member
        return member

    def _check(self, member: type[T]) -> None:
        missing = [name for name in ("name", *self.required) if _inherited(member, self.base, name)]
        if missing:
            raise UserError(
                f"{place_of(member)}: {self.kind} {member.__name__} lacks {', '.join(missing)} "
                f"(see {self.base.__module__}.{self.base.__name__})"
            )
        if self.check is not None and (complaint := self.check(member)):
            raise UserError(f"{place_of(member)}: {self.kind} {member.__name__}: {complaint}")

    def _fill(self) -> None:
        with self._lock:
            if self._filled:
                return
            self._filled = True
            try:
                package = importlib.import_module(self.package)
                for found in pkgutil.iter_modules(package.__path__):
                    self.adopt(importlib.import_module(f"{self.package}.{found.name}"))
                load_plugins()
            except BaseException:
                self._filled = False
                raise

    def adopt(self, module: ModuleType) -> list[type[T]]:
        """Register what a module defines: concrete subclasses of the base that are not private."""
        return [self.add(item) for item in _defined(module, self.base)]

    def get(self, name: str) -> type[T]:
        """The class of this name; a `UserError` with the nearest name where there is none."""
        self._fill()
        if name not in self._members:
            close = get_close_matches(name.lower(), self._members, n=1)
            hint = f"; did you mean '{close[0]}'?" if close else ""
            raise UserError(
                f"there is no {self.kind} '{name}'{hint} (there are {', '.join(sorted(self._members))}; "
                "--plugin FILE.py adds one of your own)"
            )
        return self._members[name]

    def __contains__(self, name: object) -> bool:
        self._fill()
        return name in self._members

    def __iter__(self) -> Iterator[type[T]]:
        """Members, by ``order`` where the class states one, then by name."""
        self._fill()
        return iter(sorted(self._members.values(), key=lambda member: (getattr(member, "order", 1000), _name(member))))

    def names(self) -> tuple[str, ...]:
        """Names in the order in which members are listed."""
        return tuple(_name(member) for member in self)

    def outside(self, spec: str) -> type[T]:
        """The class that ``FILE.py:Class`` names, registered."""
        self._fill()
        file, _, wanted = spec.rpartition(":")
        if not file or not wanted.isidentifier():
            raise UserError(f"'{spec}' does not name a {self.kind}: write FILE.py:Class")
        module = load_file(Path(file))
        found = getattr(module, wanted, None)
        if found is None:
            own = ", ".join(item.__name__ for item in _defined(module, self.base)) or "none"
            raise UserError(f"{file} has no class {wanted} ({self.kind}s it defines: {own})")
        if not (inspect.isclass(found) and issubclass(found, self.base)):
            raise UserError(
                f"{_where(file, wanted)}: {wanted} is no subclass of {self.base.__module__}.{self.base.__name__}"
            )
        return self.add(found)


def _name(member: type[Any]) -> str:
    return str(member.name)


def _all_names(member: type[Any]) -> set[str]:
    """Its name, and the further names that settings may call it."""
    own = vars(member).get("aliases", ())  # a subclass takes over what its parent does, not what it is called
    return {_name(member), *own}


def _defined(module: ModuleType, base: type[Any]) -> list[type[Any]]:
    found = [item for item in vars(module).values() if inspect.isclass(item) and issubclass(item, base)]
    return [
        item
        for item in found
        if item is not base and item.__module__ == module.__name__ and not item.__name__.startswith("_")
    ]


def _inherited(member: type[Any], base: type[Any], name: str) -> bool:
    """Whether ``name`` is missing, or only what the base class has."""
    return getattr(member, name, None) is None or getattr(member, name) is getattr(base, name, None)


def place_of(item: type[Any]) -> str:
    """``file:line`` of a class."""
    try:
        return f"{inspect.getsourcefile(item)}:{inspect.getsourcelines(item)[1]}"
    except (OSError, TypeError):
        return f"{item.__module__}.{item.__qualname__}"


def _where(file: str, name: str) -> str:
    """``file:line`` where a module assigns or defines a name."""
    for node in ast.parse(Path(file).read_text(encoding="utf-8")).body:
        targets = [getattr(node, "name", None), *(getattr(t, "id", None) for t in getattr(node, "targets", ()))]
        if name in targets:
            return f"{file}:{node.lineno}"
    return file


def load_file(file: Path) -> ModuleType:
    """Import a Python file of the user, once. This runs its code: see docs/trust.md."""
    if not file.is_file():
        raise UserError(f"{file}: no such file (--plugin, --method and {VARIABLE} take Python files)")
    resolved = file.resolve()
    name = f"realvr_plugin_{resolved.stem}_{hashlib.sha256(str(resolved).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, resolved)
    if spec is None or spec.loader is None:
        raise UserError(f"{file}: not a Python file (its name must end in .py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pydantic look their module up while it runs
    try:
        spec.loader.exec_module(module)
    except UserError:
        del sys.modules[name]
        raise
    except Exception as error:
        del sys.modules[name]
        raise UserError(f"{_failing_line(error, resolved)}: {type(error).__name__}: {error}") from error
    return module


def _failing_line(error: Exception, file: Path) -> str:
    if isinstance(error, SyntaxError):
        return f"{file}:{error.lineno}"
    line, step = 0, error.__traceback__
    while step is not None:
        if Path(step.tb_frame.f_code.co_filename) == file:
            line = step.tb_lineno
        step = step.tb_next
    return f"{file}:{line}" if line else str(file)


def use_plugins(files: list[str]) -> None:
    """Register the methods, benchmarks and diagnostics of these files, here and in processes started later."""
    listed = [*(os.environ.get(VARIABLE) or "").split(os.pathsep), *(str(Path(file).resolve()) for file in files)]
    os.environ[VARIABLE] = os.pathsep.join(dict.fromkeys(item for item in listed if item))
    load_plugins()


def load_plugins() -> None:
    """Register what the files of ``REALVR_PLUGINS`` define."""
    for file in filter(None, (os.environ.get(VARIABLE) or "").split(os.pathsep)):
        module = load_file(Path(file))
        # A file that subclasses a base has imported it, and with it the registry: no need to import all three here.
        if not any(_defined(module, registry.base) for registry in _REGISTRIES):
            raise UserError(f"{file} defines no method, benchmark or diagnostic")
        for registry in _REGISTRIES:
            if registry._filled:
                registry.adopt(module)
            elif _defined(module, registry.base):
                registry._fill()  # calls load_plugins again, so that a broken file is refused now and not at first use
