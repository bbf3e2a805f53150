"""Measuring models: perplexity, the six zero-shot tasks natively, and EleutherAI's harness."""
