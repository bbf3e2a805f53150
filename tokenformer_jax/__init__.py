"""TokenFormer in JAX: a small twin of the package `tokenformer` for TPUs, which shares its configs, folders and data.

Nothing here imports torch. docs/jax.md says what there is and what was tried.
"""

import importlib.util

from tokenformer.errors import UserError

if importlib.util.find_spec("jax") is None or importlib.util.find_spec("optax") is None:
    raise UserError("jax or optax is not installed: pip install 'tokenformer[jax]' (for TPUs: and 'jax[tpu]')")

from tokenformer_jax.folder import Model as Model
from tokenformer_jax.folder import load as load
from tokenformer_jax.folder import save as save
from tokenformer_jax.generate import generator as generator
from tokenformer_jax.model import How as How
from tokenformer_jax.model import logits as logits
from tokenformer_jax.model import loss as loss
