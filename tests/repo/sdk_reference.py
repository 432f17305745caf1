"""The parts of docs/reference/sdk.md that are made from the code. `python -m tests.repo.reference` writes them anew."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

import msgspec

import barchan
from barchan import errors, sdk, spec, sync
from barchan.wire import environments
from tests.repo.fields import DESCRIBED, SHORT, settings

WIDTH = 110
ALIASES = ("Text", "Command", "Input", "PathText", "Content", "Progress", "Readable")
KINDS = ("BackendName", "SandboxState", "Outcome", "LimitName")
RETURNED = {"EnvironmentInfo": environments}
"""Not importable from `barchan`, but returned by it."""
MADE_BY_USERS = ("Client",)
"""Classes whose constructor is for users; the others come from calls."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


def public_classes() -> list[type]:
    """Every public class but the errors, which are drawn as a tree."""
    found = [getattr(barchan, name) for name in barchan.__all__]
    return [cls for cls in found if inspect.isclass(cls) and not issubclass(cls, errors.BarchanError)]


def values() -> dict[str, Any]:
    """Frozen values by name, with the module that defines them, but for those that settings.md describes."""
    frozen = {cls.__name__: inspect.getmodule(cls) for cls in public_classes() if issubclass(cls, msgspec.Struct)}
    return {name: module for name, module in {**frozen, **RETURNED}.items() if name not in DESCRIBED}


def blocks() -> Iterator[tuple[str, list[str]]]:
    """Name of each generated block, and its lines."""
    for cls in public_classes():
        if not issubclass(cls, msgspec.Struct):
            yield cls.__name__, [*documentation(cls), "", *constructor(cls), *attributes(cls), *methods(cls)]
    for name, module in values().items():
        cls = getattr(module, name)
        yield name, [*documentation(cls), "", *fields(name, module), "", *attributes(cls), *methods(cls)]
    yield "types", ["```py", *assignments(ALIASES), "```"]
    yield "literals", ["```py", *assignments(KINDS), "```"]
    yield "sync", [", ".join(f"`{name}`" for name in of_sync())]
    yield "errors", ["```text", *error_tree(), "```"]


def of_sync() -> list[str]:
    """Names that mean another object in `barchan.sync`."""
    return [name for name in barchan.__all__ if getattr(barchan, name) is not getattr(sync, name)]


def fields(name: str, module: Any) -> list[str]:
    rows = settings(name, module)
    return ["| field | type | default | meaning |", "|---|---|---|---|", *rows] if rows else []


def documentation(thing: Any) -> list[str]:
    return (inspect.getdoc(thing) or "").splitlines()


def tree_of(thing: Any) -> Any:
    return ast.parse(textwrap.dedent(inspect.getsource(thing))).body[0]


def constructor(cls: Any) -> list[str]:
    if cls.__name__ not in MADE_BY_USERS:
        return []
    return ["```py", *signature(tree_of(cls.__init__), cls.__name__), "```", ""]


def attributes(cls: type) -> list[str]:
    """A table of what `__init__` sets and of the properties; nothing when there are none."""
    rows = [*_properties(cls)] if issubclass(cls, msgspec.Struct) else [*_assigned(cls), *_properties(cls)]
    return ["| attribute | type | meaning |", "|---|---|---|", *rows, ""] if rows else []


def _assigned(cls: Any) -> Iterator[str]:
    init = tree_of(cls.__init__)
    kinds = {arg.arg: ast.unparse(arg.annotation) for arg in init.args.args if arg.annotation}
    for node, after in zip(init.body, [*init.body[1:], None], strict=True):
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Attribute):
            continue
        name = node.targets[0].attr
        if not name.startswith("_"):
            kind = ast.unparse(node.value.func) if isinstance(node.value, ast.Call) else kinds[ast.unparse(node.value)]
            yield f"| `{name}` | {kind} | {_constant(after) or SHORT.get(f'{cls.__name__}.{name}', '')} |"


def _constant(node: ast.stmt | None) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return " ".join(str(node.value.value).split())
    return ""


def _properties(cls: type) -> Iterator[str]:
    for name, value in vars(cls).items():
        if isinstance(value, property) and not name.startswith("_"):
            kind = ast.unparse(tree_of(value.fget).returns)
            meaning = " ".join(documentation(value)) or SHORT.get(f"{cls.__name__}.{name}", "")
            yield f"| `{name}` | {kind} | {meaning} |"


def methods(cls: type) -> list[str]:
    """The public ones, in the order of the source."""
    lines: list[str] = []
    for name, value in vars(cls).items():
        if inspect.isfunction(value) and not name.startswith("_"):
            lines += [f"#### {cls.__name__}.{name}", "", "```py", *signature(tree_of(value), name), "```", ""]
            lines += [*documentation(value), ""]
    return lines


def signature(node: Function, name: str) -> list[str]:
    """As it stands in the source, without `self`, on one line where it fits."""
    parts = list(_parameters(node.args))
    start = "async " if isinstance(node, ast.AsyncFunctionDef) and not _is_generator(node) else ""
    end = f" -> {ast.unparse(node.returns)}" if node.returns and name not in MADE_BY_USERS else ""
    line = f"{start}{name}({', '.join(parts)}){end}"
    return [line] if len(line) <= WIDTH else [f"{start}{name}(", *(f"    {part}," for part in parts), f"){end}"]


def _is_generator(node: Function) -> bool:
    return any(isinstance(inner, ast.Yield) for inner in ast.walk(node))


def _parameters(arguments: ast.arguments) -> Iterator[str]:
    positional = arguments.posonlyargs + arguments.args
    missing = [None] * (len(positional) - len(arguments.defaults))
    for argument, default in list(zip(positional, [*missing, *arguments.defaults], strict=True))[1:]:
        yield _parameter(argument, default)
    if arguments.kwonlyargs:
        yield "*"
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield _parameter(argument, default)
    if arguments.kwarg:
        yield f"**{_parameter(arguments.kwarg, None)}"


def _parameter(argument: ast.arg, default: ast.expr | None) -> str:
    value = f" = {_value(default)}" if default else ""
    return f"{argument.arg}: {ast.unparse(argument.annotation)}{value}" if argument.annotation else argument.arg


def _value(default: ast.expr) -> str:
    """A named constant by its value, octal numbers as octal."""
    if isinstance(default, ast.Name):
        size = next(getattr(module, default.id) for module in sources() if hasattr(module, default.id))
        return f"{size >> 20} << 20"
    if isinstance(default, ast.Constant) and default.value == 0o755:
        return "0o755"
    return ast.unparse(default)


def sources() -> list[ModuleType]:
    """Modules that define what signatures name."""
    return [spec, *(import_module(f"barchan.sdk.{found.name}") for found in iter_modules(sdk.__path__))]


def assignments(names: tuple[str, ...]) -> Iterator[str]:
    """What the names in signatures stand for, as the modules define them."""
    found: dict[str, str] = {}
    for module in sources():
        text = inspect.getsource(module)
        found |= {_defined(node): ast.get_source_segment(text, node) or "" for node in ast.parse(text).body}
    for name in names:
        yield from ["", ""] if found[name].startswith("class") else []
        yield from found[name].splitlines()


def _defined(node: ast.stmt) -> str:
    if isinstance(node, ast.Assign):
        return ast.unparse(node.targets[0])
    return node.name if isinstance(node, ast.ClassDef) else ""


def error_tree() -> list[str]:
    """As drawn at the head of errors.py."""
    drawing = re.search(r"^    BarchanError$.*?(?=^\S|\Z)", errors.__doc__ or "", re.MULTILINE | re.DOTALL)
    assert drawing, "errors.py draws its tree"
    return textwrap.dedent(drawing[0]).rstrip().splitlines()


def with_block(text: str, name: str, lines: list[str]) -> str:
    """The page with these lines between the two marks of the block. A page without the marks is an error."""
    start, end = f"<!-- made from the code: {name} -->\n", "<!-- end -->\n"
    at = text.index(start) + len(start)
    body = "\n".join(lines).strip()
    return f"{text[:at]}\n{body}\n\n{text[text.index(end, at) :]}"
