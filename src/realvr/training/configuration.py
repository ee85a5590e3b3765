"""One YAML file, checked key by key, then dotted flags on top of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, ValidationError

from realvr.backbone.automatic import spelled_out
from realvr.errors import UserError
from realvr.registry import place_of
from realvr.runs.files import write_atomically
from realvr.runs.options import parse
from realvr.training import method_settings, packaged
from realvr.training.settings import (
    BaseSettings,
    MethodConfig,
    Origin,
    RlSettings,
    SftSettings,
    StageSettings,
    TrainSettings,
)

if TYPE_CHECKING:
    from realvr.training.method import Method

Kind = Literal["sft", "rl", "base"]
KINDS: dict[str, type[StageSettings]] = {"sft": SftSettings, "rl": RlSettings, "base": BaseSettings}


def load_settings(kind: str, config: str | Path, overrides: Sequence[str] = ()) -> StageSettings:
    """Settings of one training from a YAML file, or the name of a packaged one, and flags such as ``--optim.lr 1e-5``.

    Later wins: defaults, then what ``method`` stands for, then the file, then flags. A ``--method`` flag also replaces
    what the file says about the settings that the method defines.
    """
    if kind not in KINDS:
        raise UserError(f"no training is called '{kind}': choose one of {', '.join(KINDS)}")
    model, path = KINDS[kind], packaged.locate(config, kind)
    name, flags = _method_flag(_switches(overrides))
    raw = read_yaml(path)
    if name:
        raw = method_settings.choose(model, raw, name)
    method = _method_of(model, raw, "--method" if name else str(path))
    refuse_unknown(model, raw, path, method=method)
    settings = _validate(model, raw, str(path))
    if flags:
        settings = _override(kind, settings, _sectioned(flags, type(settings), method))
    return settings.came_from(Origin(str(path), frozenset(_names(overrides))))


def _names(flags: Sequence[str]) -> Iterator[str]:
    """Dotted names of the settings that flags change."""
    return (flag[2:].partition("=")[0].replace("-", "_") for flag in flags if flag.startswith("--"))


_OPTIONAL_SWITCHES = ("model.tiles", "log.tensorboard")
"""Settings that are true, false or None."""


def _switches(flags: Sequence[str]) -> list[str]:
    """``--model.tiles`` and ``--model.no-tiles`` without a value, which tyro wants for a setting that may be None
    or ``auto``."""
    yes = {f"--{name}" for name in _OPTIONAL_SWITCHES}
    no = {f"--{name.replace('.', '.no-')}": f"--{name}" for name in _OPTIONAL_SWITCHES}
    found: list[str] = []
    for index, flag in enumerate(flags):
        if flag in no:
            found += [no[flag], "False"]
            continue
        found.append(flag)
        if flag in yes and (index + 1 == len(flags) or flags[index + 1].startswith("--")):
            found.append("True")
    return spelled_out(found)


def show_help(kind: str, flags: Sequence[str] = ()) -> None:
    """Print every setting of a training with its default; with ``--method`` among the flags, those of that method."""
    model, name = KINDS[kind], _method_flag(list(flags))[0]
    placeholder = {"model": {"path": "MODEL"}, "data": {"sources": [{"path": "DATA"}]}, "run": {"out": "RUN"}}
    raw = method_settings.choose(model, placeholder, name) if name else placeholder
    offered = method_settings.offered(kind)
    width = max(len(method.name) for method in offered)
    print("methods (the first is the default):")
    print("\n".join(f"  {method.name:<{width}}  {method.about()['summary']}" for method in offered), end="\n\n")
    _override(kind, model.model_validate(raw), ["--help"])


def dump(settings: TrainSettings) -> str:
    """The resolved settings as YAML that ``load_settings`` reads back to the same."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def save_resolved(settings: TrainSettings, path: str | Path) -> Path:
    """Write the resolved settings."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, dump(settings))
    return path


def kind_of(settings: TrainSettings) -> str:
    """The word after ``realvr train`` that settings belong to."""
    return next((kind for kind, model in KINDS.items() if type(settings) is model), "train")


def differences(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ between two dumped settings, with both values."""
    before, after = dict(flatten(old)), dict(flatten(new))
    keys = [*before, *(key for key in after if key not in before)]
    return {key: (before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)}


def flatten(value: object, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of dumped settings."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        yield prefix, value
        return
    for key, inner in items:
        yield from flatten(inner, f"{prefix}.{key}" if prefix else str(key))


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"{path}: the settings cannot be read ({reason})") from error
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise UserError(f"{path}{where}: this is not YAML ({getattr(error, 'problem', None) or error})") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected 'key: value' lines, found {'nothing' if value is None else repr(value)}")
    return value


def refuse_unknown(
    model: type[BaseModel],
    raw: dict[str, Any],
    path: Path,
    prefix: str = "",
    method: type[Method[Any, Any, Any]] | None = None,
) -> None:
    """Raise for the first key that is not a setting, with the nearest that is. Settings of ``method`` may stand in
    their section or beside it."""
    own = method.Config.model_fields if method else {}
    for key, value in raw.items():
        dotted = f"{prefix}{key}"
        if key not in model.model_fields and key not in own:
            raise UserError(f"{path}: unknown setting '{dotted}'{_suggestion(str(key), model, prefix, method)}")
        if key == "method" and method is not None:
            for inner_key in value if isinstance(value, dict) else ():
                if inner_key not in own:
                    hint = _suggestion(str(inner_key), method.Config, "method.")
                    raise UserError(f"{path}: unknown setting 'method.{inner_key}'{hint}{_home(method)}")
            continue
        inner = _section(model.model_fields[key].annotation) if key in model.model_fields else None
        if inner is None:
            continue
        if isinstance(value, dict):
            refuse_unknown(inner, value, path, f"{dotted}.")
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, dict):
                    refuse_unknown(inner, item, path, f"{dotted}.{index}.")


def _section(annotation: object) -> type[BaseModel] | None:
    """The settings class of a field, or of the items of a list field."""
    candidates = (annotation, *get_args(annotation))
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)


def _suggestion(
    key: str, model: type[BaseModel], prefix: str, method: type[Method[Any, Any, Any]] | None = None
) -> str:
    for name, field in model.model_fields.items():
        inner = _section(field.annotation)
        if inner is not None and key in inner.model_fields:
            return f"; did you mean '{prefix}{name}.{key}'?"
    places = {name: f"{prefix}{name}" for name in model.model_fields}
    if method is not None:
        places |= {name: f"method.{name}" for name in method.Config.model_fields if name not in places}
    close = get_close_matches(key, list(places), n=1)
    about = _home(method) if method is not None else ""
    if close:
        return f"; did you mean '{places[close[0]]}'?{about if places[close[0]].startswith('method.') else ''}"
    return f"; known here: {', '.join(model.model_fields)}{about}"


def _validate(model: type[StageSettings], raw: dict[str, Any], origin: str) -> StageSettings:
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise UserError(f"{origin}: {_first_problem(error)}") from error


def _first_problem(error: ValidationError) -> str:
    problem = error.errors()[0]
    where = ".".join(str(part) for part in problem["loc"])
    text = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "missing":
        return f"'{where}' is required"
    given = "" if isinstance(problem["input"], dict | BaseModel) else f" (it is {problem['input']!r})"
    more = f"; {error.error_count() - 1} more" if error.error_count() > 1 else ""
    return f"{where}: {text}{given}{more}" if where else f"{text}{more}"


def _method_of(model: type[StageSettings], raw: dict[str, Any], origin: str) -> type[Method[Any, Any, Any]]:
    try:
        return method_settings.find_method(model.stage, method_settings.named(model, raw))
    except UserError as error:
        raise UserError(f"{origin}: {error}") from error


def _method_flag(flags: list[str]) -> tuple[str | None, list[str]]:
    """Take ``--method NAME`` (or ``--method.type NAME``) out of the flags: it also changes what the file means."""
    for index, flag in enumerate(flags):
        name, equals, value = flag.partition("=")
        if name not in ("--method", "--method.type"):
            continue
        rest = flags[:index] + flags[index + (1 if equals else 2) :]
        if not equals:
            value = flags[index + 1] if index + 1 < len(flags) else ""
        if not value or value.startswith("--"):
            raise UserError(f"{name} needs the name of a method, or FILE.py:Class")
        return value, rest
    return None, flags


def _sectioned(flags: Sequence[str], model: type[BaseModel], method: type[Method[Any, Any, Any]]) -> list[str]:
    """Flags of the method's own settings with their section: ``--eta`` is ``--method.eta``. Refuses those of the
    section that the method does not have."""
    own = method.Config.model_fields
    found = []
    for flag in flags:
        name = flag[2:].partition("=")[0].replace("-", "_") if flag.startswith("--") else ""
        first, _, rest = name.partition(".")
        field = first.removeprefix("no_")
        if first == "method" and rest.partition(".")[0].removeprefix("no_") not in own and rest not in own:
            raise UserError(
                f"command line: unknown setting '{name}'{_suggestion(rest, method.Config, 'method.')}{_home(method)}"
            )
        inside = first not in model.model_fields and (first in own or field in own)
        found.append(f"--method.{flag[2:]}" if inside else flag)
    return found


def _home(method: type[Method[Any, Any, Any]]) -> str:
    """Where the settings of a method are defined."""
    return f" (settings of method '{method.name}': {place_of(method.Config)})"


def _override(kind: str, settings: StageSettings, flags: list[str]) -> StageSettings:
    """Dotted flags on top of validated settings. A flag that does not exist exits with code 2 and a suggestion
    (tyro's)."""
    import tyro

    parsed = parse(
        _plain_class(type(settings), type(settings.method)),
        flags,
        f"realvr train {kind} CONFIG",
        type(settings).__doc__,
        default=_plain(settings),
        config=(tyro.conf.AvoidSubcommands,),
    )
    return _validate(type(settings), dataclasses.asdict(parsed), "command line")


@cache
def _plain_class(model: type[BaseModel], method: type[MethodConfig] | None) -> type[Any]:
    """A dataclass with the fields of a settings class and none of its checks; ``method`` is what its method has.

    Tyro would bury the message of a failed check in pages of its own; this way flags are parsed first and the result is
    checked like a file.
    """
    import tyro

    fields: list[tuple[str, Any]] = []
    for name, field in model.model_fields.items():
        inner = method if name == "method" and method is not None else _section(field.annotation)
        annotation: Any = field.annotation
        if inner is not None:
            plain = _plain_class(inner, None)
            annotation = plain if isinstance(field.annotation, type) else list[plain]  # type: ignore[valid-type]
        help_text = " ".join((field.description or "").replace("``", "").split()) or None
        fields.append((name, Annotated[annotation, tyro.conf.arg(help=help_text)]))
    made = dataclasses.make_dataclass(model.__name__, fields)
    made.__doc__ = model.__doc__
    return made


def _plain(value: object) -> object:
    """Settings as an instance of their plain class."""
    if isinstance(value, BaseModel):
        names = type(value).model_fields
        method = type(value.method) if isinstance(value, StageSettings) else None
        return _plain_class(type(value), method)(**{name: _plain(getattr(value, name)) for name in names})
    return [_plain(item) for item in value] if isinstance(value, list) else value
