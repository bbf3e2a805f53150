"""One file `modeling_tokenformer.py` from ours, for people who have torch and transformers but not this package.

It is the closure of the two transformers classes over our top-level definitions, in order of import: the same lines,
so the same numbers. Our files are read as text; nothing is imported to write it.
"""

import ast
import functools
import symtable
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenformer import __version__

FILE = "modeling_tokenformer.py"
AUTO_MAP = {
    "AutoConfig": "modeling_tokenformer.TokenFormerConfig",
    "AutoModelForCausalLM": "modeling_tokenformer.TokenFormerForCausalLM",
}
LEFT_OUT = ("save_pretrained",)  # methods: transformers itself copies the file of a class that came from a folder
HEADER = f'''"""TokenFormer for transformers in one file, for folders that are loaded with `trust_remote_code=True`.

Written by tokenformer {__version__} from its own sources (Apache-2.0, the tokenformer authors): change those, not this.
The model: "TokenFormer: Rethinking Transformer Scaling with Tokenized Model Parameters" (arXiv 2410.23168).
"""
'''
Definition = ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


class _Source:
    """One of our files: its top-level definitions, and where the other names in it come from."""

    def __init__(self, module: str) -> None:
        path = Path(__file__).parent.parent.joinpath(*module.split(".")[1:])
        self.name = f"{module.replace('.', '/')}.py"
        self.text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8")
        self.tree = ast.parse(self.text)
        self.definitions: dict[str, Definition] = {}
        self.ours: dict[str, str] = {}  # name → our module
        self.others: dict[str, str] = {}  # name → line that imports it
        for node in self.tree.body:
            for inner in node.body if isinstance(node, ast.Try) else [node]:  # try: what may be missing with us
                self._add(inner)

    def _add(self, node: ast.stmt) -> None:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tokenformer":
            self.ours |= {alias.name: node.module or "" for alias in node.names}
        elif isinstance(node, ast.Import | ast.ImportFrom):
            start = f"from {node.module} " if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                name = alias.asname or alias.name.split(".")[0]
                self.others[name] = f"{start}import {ast.unparse(alias)}"
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            self.definitions[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                self.definitions[ast.unparse(target)] = node

    def cut(self, node: Definition) -> str:
        """The lines of a definition with its decorators and the comments above it, without what is left out."""
        lines, start = self.text.split("\n"), min(n.lineno for n in [node, *getattr(node, "decorator_list", [])])
        while lines[start - 2].startswith("#"):
            start -= 1
        gone = {i for method in _left_out(node) for i in range(method.lineno - 1, (method.end_lineno or 0) + 1)}
        return "\n".join(lines[i - 1] for i in range(start, (node.end_lineno or 0) + 1) if i not in gone)


def _left_out(node: Definition) -> list[ast.stmt]:
    return [n for n in getattr(node, "body", []) if isinstance(n, ast.FunctionDef) and n.name in LEFT_OUT]


def _used(source: _Source, node: Definition) -> set[str]:
    """Names of the file's top level that a definition reads; a local of the same name is none."""

    def free(table: symtable.SymbolTable) -> Iterator[str]:
        yield from (symbol.get_name() for symbol in table.get_symbols() if symbol.is_global())
        for child in table.get_children():
            if child.get_name() not in LEFT_OUT:
                yield from free(child)

    outside: list[ast.AST] = [node]  # bases, decorators, annotations and defaults belong to the top level
    if isinstance(node, ast.ClassDef):
        outside = [*node.bases, *node.keywords, *node.decorator_list]
    elif isinstance(node, ast.FunctionDef):
        outside = [node.args, *node.decorator_list, *([node.returns] if node.returns else [])]
    names = {inner.id for part in outside for inner in ast.walk(part) if isinstance(inner, ast.Name)}
    tables = symtable.symtable(source.text, source.name, "exec").get_children()
    return names.union(*(free(table) for table in tables if table.get_name() == getattr(node, "name", None)))


@functools.cache
def modeling_source() -> str:
    """The text of `modeling_tokenformer.py`."""
    sources: dict[str, _Source] = {}  # in order of import
    kept: dict[str, str] = {}  # definition → module
    imports: dict[str, str] = {}  # name → line

    def read(module: str) -> None:
        source = _Source(module)
        for other in dict.fromkeys(source.ours.values()):
            if other not in sources:
                read(other)
        sources[module] = source

    def keep(module: str, name: str) -> None:
        source = sources[module]
        if name in source.definitions:
            if kept.setdefault(name, module) != module or name in imports:
                raise RuntimeError(f"'{name}' stands in {module} and elsewhere: one file cannot hold both")
            for other in _used(source, source.definitions[name]):
                if kept.get(other) != module:
                    keep(module, other)
        elif name in source.ours:
            keep(source.ours[name], name)
        elif name in source.others and (
            imports.setdefault(name, source.others[name]) != source.others[name] or name in kept
        ):
            raise RuntimeError(f"'{name}' of {module} is something else in another file: one file cannot hold both")

    read("tokenformer.hub.hf")
    for cls in AUTO_MAP.values():
        keep("tokenformer.hub.hf", cls.split(".")[1])
    parts = [HEADER + "\n" + "\n".join(sorted(set(imports.values())))]
    for module, source in sources.items():
        nodes = {id(node): node for name, node in source.definitions.items() if kept.get(name) == module}
        if nodes:
            about = "\n".join(f"# {line}".rstrip() for line in (ast.get_docstring(source.tree) or "").split("\n"))
            parts += [f"# {source.name}\n{about}", *(source.cut(node) for node in nodes.values())]
    text = "\n\n\n".join(part.strip("\n") for part in parts) + "\n"
    wrong = {
        name for name in _imported(ast.parse(text)) if name not in {*sys.stdlib_module_names, "torch", "transformers"}
    }
    if wrong:
        raise RuntimeError(f"{FILE} would import {', '.join(sorted(wrong))}, which its readers may not have")
    return text


def _imported(node: ast.AST) -> Iterator[str]:
    """Top-level packages that a tree imports; inside `try` anything goes."""
    if isinstance(node, ast.Import):
        yield from (alias.name.split(".")[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield (node.module or "").split(".")[0]
    elif not isinstance(node, ast.Try):
        for child in ast.iter_child_nodes(node):
            yield from _imported(child)
