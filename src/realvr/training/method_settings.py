"""The ``method`` section of a settings file: which method it names, and what that method fills in.

Both spellings are read: ``method: {type: realvr, eta: 0.4}``, and ``method: realvr`` with ``eta: 0.4`` beside it. A
method fixes what makes it what it is and leaves every other setting alone: ``realvr`` with another ``eta`` is still
ReaLVR, ``uniform`` with ``eta = 0.5`` is not and is refused. ``custom`` fixes nothing.

Looking a method up imports the methods, and torch with them; importing this module does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from realvr.errors import UserError
from realvr.registry import place_of

if TYPE_CHECKING:
    from realvr.training.method import Method
    from realvr.training.settings import StageSettings

Raw = dict[str, Any]
STAGES = ("sft", "rl", "base")


def offered(stage: str) -> list[type[Method[Any, Any, Any]]]:
    """The methods of a stage, plugins included."""
    from realvr.training.method import METHODS

    return [method for method in METHODS if method.stage == stage]


def find_method(stage: str, name: str) -> type[Method[Any, Any, Any]]:
    """The method of a stage by its name, or by ``FILE.py:Class``."""
    from realvr.training.method import METHODS

    method = METHODS.outside(name) if ".py:" in name or name.endswith(".py") else _by_name(name, offered(stage))
    if method.stage not in STAGES:
        raise UserError(f"{place_of(method)}: stage is '{method.stage}'; choose one of {', '.join(STAGES)}")
    if method.stage != stage:
        raise UserError(f"method '{name}' belongs to `realvr train {method.stage}`, not to `realvr train {stage}`")
    return method


def _by_name(name: str, here: list[type[Method[Any, Any, Any]]]) -> type[Method[Any, Any, Any]]:
    from realvr.training.method import METHODS

    for method in here:
        if name == method.name or name in method.aliases:
            return method
    other = next((method for method in METHODS if name in (method.name, *method.aliases)), None)
    if other is not None:
        return other
    names = [method.name for method in here]
    close = get_close_matches(name, names, n=1)
    hint = f"did you mean '{close[0]}'?" if close else f"choose one of {', '.join(names)}, or FILE.py:Class"
    raise UserError(f"no method is called '{name}'; {hint}")


def named(settings: type[StageSettings], raw: Mapping[str, Any]) -> str:
    """The name of the method that raw settings choose."""
    given = raw.get("method", settings.default_method)
    name = given.get("type", settings.default_method) if isinstance(given, Mapping) else given
    name = getattr(name, "type", name)  # a config that was built in Python
    if not isinstance(name, str) or not name:
        raise UserError(f"method: expected a name, FILE.py:Class or a section with a type, found {name!r}")
    return name


def arrange(settings: type[StageSettings], raw: Mapping[str, Any]) -> Raw:
    """Raw settings with the method's own in their section, and those that the method defines filled in.

    Raises ValueError where a setting is given twice, or contradicts the method.
    """
    name = named(settings, raw)
    method, found = find_method(settings.stage, name), dict(raw)
    given = found.pop("method", None)
    own = given.model_dump() if hasattr(given, "model_dump") else given if isinstance(given, dict) else {}
    inner: Raw = {**own, "type": name if ".py:" in name else method.name}
    for key in [key for key in found if key in method.Config.model_fields and key not in settings.model_fields]:
        value = found.pop(key)
        if inner.setdefault(key, value) != value:
            raise ValueError(f"{key} is {_text(value)}, but method.{key} is {_text(inner[key])}: keep one of them")
    found["method"] = inner
    for key, value in method.fixed.items():
        _fill(found, inner, key, value, method)
    return found


def _fill(found: Raw, inner: Raw, key: str, value: object, method: type[Method[Any, Any, Any]]) -> None:
    section, _, field = key.rpartition(".")
    home = inner
    if section:
        there = found.get(section, {})
        home = found[section] = dict(there) if isinstance(there, Mapping) else there.model_dump()
    given = home.get(field)
    if given is not None and given != value:
        raise ValueError(
            f"method '{method.name}' means {key} = {_text(value)}, but {key} is {_text(given)}: "
            f"drop {key}, or choose method '{_free(method.stage)}' to combine settings freely"
        )
    home[field] = value


def _free(stage: str) -> str:
    """The method of a stage that fixes nothing."""
    return next(method.name for method in offered(stage) if not method.fixed)


def choose(settings: type[StageSettings], raw: Raw, name: str) -> Raw:
    """Raw settings of a file, prepared for a method chosen on the command line: what it defines is dropped."""
    method = find_method(settings.stage, name)
    kept = dict(raw)
    given = kept.get("method")
    inner = {**given, "type": name} if isinstance(given, dict) else {"type": name}
    for key in method.fixed:
        section, _, field = key.rpartition(".")
        if section and isinstance(kept.get(section), Mapping):
            kept[section] = {name: value for name, value in kept[section].items() if name != field}
        elif not section:
            kept.pop(field, None)
            inner.pop(field, None)
    kept["method"] = inner
    return kept


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
