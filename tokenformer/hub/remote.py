"""Writes `modeling_tokenformer.py` from our files, for people who have torch and transformers but not this package.

It holds the two transformers classes and every definition of ours that they need, in order of import: the same lines,
so the same numbers. Our files are read as text; nothing is imported to write it.
"""

import ast
import functools
import symtable
from pathlib import Path

from tokenformer import __version__

FILE = "modeling_tokenformer.py"
MAPS = {  # of each kind of model: which of its classes transformers' Auto classes make
    "language": {
        "AutoConfig": "modeling_tokenformer.TokenFormerConfig",
        "AutoModel": "modeling_tokenformer.TokenFormerModel",
        "AutoModelForCausalLM": "modeling_tokenformer.TokenFormerForCausalLM",
    },
    "image": {
        "AutoConfig": "modeling_tokenformer.TokenFormerImageConfig",
        "AutoModelForImageClassification": "modeling_tokenformer.TokenFormerForImageClassification",
    },
    "pair": {
        "AutoConfig": "modeling_tokenformer.TokenFormerPairConfig",
        "AutoModel": "modeling_tokenformer.TokenFormerPairModel",
        "AutoModelForZeroShotImageClassification": "modeling_tokenformer.TokenFormerPairModel",
    },
}
# methods: transformers itself copies the file of a class that came from a folder, and our adapters need the package
LEFT_OUT = ("save_pretrained", "_attach", "set_adapter", "_theirs_count", "disable_adapters", "enable_adapters",
            "active_adapters", "delete_adapter")  # fmt: skip
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
        text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8")
        gone = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef) and n.name in LEFT_OUT]
        lines = {i for method in gone for i in range(method.lineno - 1, method.end_lineno or 0)}
        self.text = "\n".join(line for i, line in enumerate(text.split("\n")) if i not in lines)
        self.name, self.tree = module, ast.parse(self.text)
        self.definitions: dict[str, Definition] = {}
        self.ours: dict[str, str] = {}  # name → our module
        self.others: dict[str, str] = {}  # name → line that imports it
        for node in self.tree.body:
            for inner in node.body if isinstance(node, ast.Try) else [node]:  # try: packages that may be missing
                self._add(inner)

    def _add(self, node: ast.stmt) -> None:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tokenformer":
            self.ours |= {alias.name: node.module or "" for alias in node.names}
        elif isinstance(node, ast.Import | ast.ImportFrom):
            start = f"from {node.module} " if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                self.others[alias.asname or alias.name.split(".")[0]] = f"{start}import {ast.unparse(alias)}"
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            self.definitions[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                self.definitions[ast.unparse(target)] = node

    def cut(self, node: Definition) -> str:
        """Return the lines of a definition, with its decorators and the comments above it."""
        lines, start = self.text.split("\n"), min(n.lineno for n in [node, *getattr(node, "decorator_list", [])]) - 1
        while lines[start - 1].startswith("#"):
            start -= 1
        return "\n".join(lines[start : node.end_lineno]).rstrip()

    def used(self, node: Definition) -> set[str]:
        """Return the top-level names that a definition uses; a local variable of the same name is none."""
        outside: list[ast.AST] = [node]  # bases, decorators, annotations and defaults belong to the top level
        if isinstance(node, ast.ClassDef):
            outside = [*node.bases, *node.keywords, *node.decorator_list]
        elif isinstance(node, ast.FunctionDef):
            outside = [node.args, *node.decorator_list, *([node.returns] if node.returns else [])]
        names = {inner.id for part in outside for inner in ast.walk(part) if isinstance(inner, ast.Name)}
        tables = symtable.symtable(self.text, self.name, "exec").get_children()
        return names.union(*(_free(table) for table in tables if table.get_name() == getattr(node, "name", None)))


def _free(table: symtable.SymbolTable) -> set[str]:
    names = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global()}
    return names.union(*map(_free, table.get_children()))


@functools.cache
def modeling_source(of: str = "language") -> str:
    """Return the text of `modeling_tokenformer.py` for models of language, of image or of pair."""
    sources: dict[str, _Source] = {}  # in order of import
    kept: dict[str, str] = {}  # name → the module that defines it, or the line that imports it

    def read(module: str) -> None:
        source = _Source(module)
        for other in dict.fromkeys(source.ours.values()):
            if other not in sources:
                read(other)
        sources[module] = source

    def keep(module: str, name: str) -> None:
        source = sources[module]
        origin = module if name in source.definitions else source.others.get(name)
        if origin is None:
            return keep(source.ours[name], name) if name in source.ours else None  # else a builtin
        if kept.get(name, origin) != origin:
            raise RuntimeError(f"'{name}' of {module} is something else in another file: {FILE} cannot hold both")
        if name not in kept and name in source.definitions:
            kept[name] = origin
            for other in sorted(source.used(source.definitions[name])):
                keep(module, other)
        kept[name] = origin

    read(f"tokenformer.hub.hf.{of}")
    for cls in MAPS[of].values():
        keep(f"tokenformer.hub.hf.{of}", cls.split(".")[1])
    parts = [HEADER + "\n" + "\n".join(sorted({origin for origin in kept.values() if " " in origin}))]
    for module, source in sources.items():
        nodes = {id(node): node for name, node in source.definitions.items() if kept.get(name) == module}
        if nodes:
            about = "\n".join(f"# {line}".rstrip() for line in (ast.get_docstring(source.tree) or "").split("\n"))
            parts += [f"# {module}\n{about}", *map(source.cut, nodes.values())]
    return "\n\n\n".join(parts) + "\n"
