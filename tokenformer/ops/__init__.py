"""Functions on tensors: no modules, no state. What a model computes is written here and nowhere else."""
