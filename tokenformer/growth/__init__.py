"""Bigger and smaller without starting again: arithmetic on (config, tensors, optimizer state)."""

from tokenformer.growth.merge import merge_segments as merge_segments
from tokenformer.growth.model import follow as follow
from tokenformer.growth.model import grow as grow
from tokenformer.growth.model import plan as plan
from tokenformer.growth.model import slice as slice
from tokenformer.growth.plan import Grown as Grown
from tokenformer.growth.plan import Plan as Plan
from tokenformer.growth.plan import apply as apply
from tokenformer.growth.shrink import shrink as shrink
