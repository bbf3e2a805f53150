"""Imports a library where packages that it imports, but that are not used here, are missing. No test in here."""

import contextlib
import importlib
import sys
import types
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from typing import Any


class Anything(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})


class Finder:
    def __init__(self, packages: tuple[str, ...]) -> None:
        self.packages = packages

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self.packages else None

    def create_module(self, spec):
        return None

    def exec_module(self, module: types.ModuleType):
        module.__getattr__ = lambda name: getattr(Anything("any", (), {}), name)  # type: ignore


@contextlib.contextmanager
def imported(name: str, *missing: str) -> Iterator[Any]:
    """Import a library; of the missing packages everything can be imported, and nothing works."""
    with contextlib.suppress(ImportError):  # transformers asks once: let it see what is really there, for later tests
        importlib.import_module("transformers.utils").is_torchvision_available()
    before, finder = set(sys.modules), Finder(missing)
    sys.meta_path.insert(0, finder)
    try:
        yield importlib.import_module(name)
    finally:
        sys.meta_path.remove(finder)
        for module in set(sys.modules) - before:
            if module.partition(".")[0] in missing:
                del sys.modules[module]
