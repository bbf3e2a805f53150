"""Bigger and smaller without starting again: arithmetic on config, tensors and optimizer state.

plan.py decides (it needs no torch), make.py makes the tensors, model.py builds the grown model.
"""
