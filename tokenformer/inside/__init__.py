"""Looking into a trained model: what its parameter tokens do on a text, and what they write."""

from tokenformer.inside.ablation import Token, ablate
from tokenformer.inside.tally import Tally, explore

__all__ = ["Tally", "Token", "ablate", "explore"]
