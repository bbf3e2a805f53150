"""TokenFormer in JAX: a small twin of the package `tokenformer` for TPUs, which shares its configs, folders and data.

Nothing here imports torch. docs/jax.md says what there is and what was tried.
"""

import importlib.util

from tokenformer.errors import UserError

_HOME = {"Model": "folder", "load": "folder", "save": "folder", "generator": "generate", "Trainer": "train"}
_HOME |= {"How": "model", "logits": "model", "loss": "model"}
__all__ = list(_HOME)


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'tokenformer_jax' has no attribute '{name}'")
    need_jax()
    return getattr(importlib.import_module(f"tokenformer_jax.{_HOME[name]}"), name)


def need_jax() -> None:
    """Refuse in a sentence where JAX is not installed."""
    if importlib.util.find_spec("jax") is None or importlib.util.find_spec("optax") is None:
        raise UserError("JAX or optax is not installed: pip install 'tokenformer[jax]', and on TPUs 'jax[tpu]'")
