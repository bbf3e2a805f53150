"""Training: build → resume → loop → close, checkpoints that are whole or not there, and what the user sees of it."""
