"""The source text of a class, from which the documentation of its fields is read."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any


@cache
def statements(cls: Any) -> list[ast.stmt] | None:
    """Return the statements in the body of a class; None: its source is not in a file, as in a notebook."""
    try:
        # Not of the class itself, of which Python up to 3.12 finds the first definition of the name.
        lines, _ = inspect.findsource(sys.modules[cls.__module__])
        found = _classes("".join(lines)).get(cls.__qualname__, [])
    except (OSError, TypeError, KeyError, SyntaxError):
        return None
    if not found:
        return None
    # Of several definitions, Python knows the line of this one since 3.13; before, its fields have to tell.
    first, typed = getattr(cls, "__firstlineno__", None), list(inspect.get_annotations(cls))
    there = [each for each in found if first in (each.lineno, *(line.lineno for line in each.decorator_list))]
    alike = [each for each in found if _typed(each) == typed]
    return (there or alike or found)[-1].body


def _typed(definition: ast.ClassDef) -> list[str]:
    """Return the names to which the body of a class gives types."""
    targets = [statement.target for statement in definition.body if isinstance(statement, ast.AnnAssign)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


@cache
def _classes(text: str) -> dict[str, list[ast.ClassDef]]:
    """Return the classes in the ``text`` of a module by their qualified names, in the order of their definitions."""
    found: dict[str, list[ast.ClassDef]] = {}
    for name, each in _inside(ast.parse(text), ""):
        found.setdefault(name, []).append(each)
    return found


def _inside(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.ClassDef]]:
    for each in ast.iter_child_nodes(node):
        if isinstance(each, ast.ClassDef):
            yield f"{prefix}{each.name}", each
            yield from _inside(each, f"{prefix}{each.name}.")
        elif isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _inside(each, f"{prefix}{each.name}.<locals>.")
        elif isinstance(each, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from _inside(each, prefix)
