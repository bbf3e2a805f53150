"""transformers' classes for our models. Importing this registers them with AutoConfig and AutoModelForCausalLM.

The only place that imports transformers; folders are read and written without it (`hub/hf_folder.py`).
"""

from tokenformer.hub.hf.language import TokenFormerConfig, TokenFormerForCausalLM

__all__ = ["TokenFormerConfig", "TokenFormerForCausalLM"]
