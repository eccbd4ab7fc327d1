"""Functions and classes as they stand in a source tree, and a fingerprint of each.

Read from files, never imported: so it does not matter what is hooked by now, and an SGLang can be looked at that is not
installed. Comments, docstrings and formatting do not count.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterable
from importlib.resources.abc import Traversable
from typing import Any, NamedTuple

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Source(NamedTuple):
    text: str  # as written, decorators included
    fingerprint: str


class _Module(NamedTuple):
    file: str
    lines: list[str]
    tree: ast.Module


class Tree:
    """The Python modules below ``root``, the folder that holds a top-level package: site-packages, or a wheel as a
    ``zipfile.Path``. Each file is parsed once."""

    def __init__(self, root: Traversable) -> None:
        self.root = root
        self._modules: dict[tuple[str, ...], _Module | None] = {}

    def find(self, target: str) -> Source | None:
        """The function, class or method with a dotted path, also where its class inherits it; None if there is none."""
        *path, name = target.split(".")
        if (module := self._module(*path)) is not None:
            node = _defined(module.tree).get(name)
            return None if node is None else _source(module, node)
        *path, owner = path
        if not path or (module := self._module(*path)) is None:
            return None
        cls = _defined(module.tree).get(owner)
        if not isinstance(cls, ast.ClassDef):
            return None
        node = _defined(cls).get(name)
        if node is not None:
            return _source(module, node)
        imported = {
            alias.name: statement.module
            for statement in module.tree.body
            if isinstance(statement, ast.ImportFrom) and not statement.level
            for alias in statement.names
        }
        bases = [base.id for base in cls.bases if isinstance(base, ast.Name)]
        inherited = (self.find(f"{imported.get(base, '.'.join(path))}.{base}.{name}") for base in bases)
        return next((source for source in inherited if source is not None), None)

    def digests(self, files: Iterable[str] | None = None) -> dict[str, str | None]:
        """A digest of each of ``files``, by default of those parsed so far; None for a file that does not exist."""
        names = [module.file for module in self._modules.values() if module] if files is None else files
        contents = {name: self._read(name) for name in names}
        return {name: None if content is None else _digest(content) for name, content in contents.items()}

    def _module(self, *path: str) -> _Module | None:
        if path not in self._modules:
            name = "/".join(path)
            read = ((file, self._read(file)) for file in (f"{name}.py", f"{name}/__init__.py"))
            found = ((file, content.decode()) for file, content in read if content is not None)
            self._modules[path] = next(
                (_Module(file, text.splitlines(), ast.parse(text)) for file, text in found), None
            )
        return self._modules[path]

    def _read(self, file: str) -> bytes | None:
        place = self.root
        for part in file.split("/"):
            place = place / part
        return place.read_bytes() if place.is_file() else None


def _defined(scope: ast.Module | ast.ClassDef) -> dict[str, _Definition]:
    return {node.name: node for node in scope.body if isinstance(node, _Definition)}


def _source(module: _Module, node: _Definition) -> Source:
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return Source("\n".join(module.lines[first - 1 : node.end_lineno]), _fingerprint(node))


def _fingerprint(node: _Definition) -> str:
    return _digest(json.dumps(_plain(node)).encode())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _plain(node: Any) -> Any:
    """A syntax tree as lists. Not ``ast.dump`` or ``ast.unparse``: what they print differs between Python versions."""
    if isinstance(node, list):
        return [_plain(item) for item in node]
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = dict(ast.iter_fields(node))
    if isinstance(node, _Definition) and ast.get_docstring(node, clean=False) is not None:
        fields["body"] = node.body[1:]
    # Python 3.12 added fields (type_params) that are empty for all that could be written before.
    given = {name: value for name, value in fields.items() if value is not None and value != []}
    return [type(node).__name__, {name: _plain(value) for name, value in given.items()}]
