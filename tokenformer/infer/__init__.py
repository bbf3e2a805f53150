"""Decoding: a static key/value cache, prefill in chunks, single-token steps (a CUDA graph), sampling on the device."""

from tokenformer.infer.batch import Finished as Finished
from tokenformer.infer.engine import Engine as Engine
from tokenformer.infer.sampling import Sampling as Sampling
from tokenformer.infer.text import TextResult as TextResult
from tokenformer.infer.text import write_texts as write_texts
