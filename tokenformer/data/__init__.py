"""Data: from sources to exactly resumable batches. Without torch, so that workers start quickly."""
