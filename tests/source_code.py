"""parplan's own source as syntax trees: identifiers, docstrings, imports and function lengths, for the house tests."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "parplan"


@dataclass(frozen=True)
class Module:
    """One file of parplan/: its path below parplan/ and its syntax tree."""

    path: str
    lines: int
    tree: ast.Module

    @property
    def name(self) -> str:
        """Dotted name for imports: "parplan.graph.layers"."""
        parts = ("parplan", *Path(self.path).with_suffix("").parts)
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> tuple[Module, ...]:
    """All modules of parplan/, by path."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
    return tuple(
        Module(path.relative_to(PACKAGE).as_posix(), len(text.splitlines()), ast.parse(text))
        for path, text in texts.items()
    )


def imports(module: Module) -> Iterator[str]:
    """Modules of parplan that a module imports anywhere, in functions and under TYPE_CHECKING too."""
    names = {other.name for other in modules()}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in names)
        elif isinstance(node, ast.ImportFrom) and node.module in names:
            full = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name if name in names else node.module for name in full)


@dataclass(frozen=True)
class Function:
    """A function or method; `uses` counts its name's other appearances in its file."""

    path: str
    name: str
    lines: int
    uses: int

    @property
    def private(self) -> bool:
        """Whether its name starts with one underscore."""
        return self.name.startswith("_") and not self.name.startswith("__")


def functions() -> list[Function]:
    """All functions and methods of parplan/."""
    found = []
    for module in modules():
        nodes = list(ast.walk(module.tree))
        uses = Counter(node.id for node in nodes if isinstance(node, ast.Name))
        uses += Counter(node.attr for node in nodes if isinstance(node, ast.Attribute))
        for node in nodes:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                found.append(Function(module.path, node.name, lines, uses[node.name]))
    return found


@dataclass(frozen=True)
class Identifier:
    """A name that a module introduces, and its role: module, class, function, field, parameter or variable."""

    name: str
    role: str
    line: int = 1


def identifiers(module: Module) -> Iterator[Identifier]:
    """The module's own name and every name that its code defines; names that it only reads are defined elsewhere."""
    yield Identifier(module.name.rpartition(".")[2], "module")
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef):
            yield Identifier(node.name, "class", node.lineno)
            annotated = (statement for statement in node.body if isinstance(statement, ast.AnnAssign))
            yield from (Identifier(s.target.id, "field", s.lineno) for s in annotated if isinstance(s.target, ast.Name))
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield Identifier(node.name, "function", node.lineno)
        elif isinstance(node, ast.arg):
            yield Identifier(node.arg, "parameter", node.lineno)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield Identifier(node.id, "variable", node.lineno)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield Identifier(node.attr, "field", node.lineno)


def docstring_starts(module: Module) -> Iterator[tuple[int, str]]:
    """(line, first line of the docstring) of the module and of everything in it."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(module.tree):
        if isinstance(node, documented) and (text := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), text.partition("\n")[0]
