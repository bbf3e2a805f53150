"""Data: from raw text to exactly resumable batches. Nothing is imported here, so that workers start without torch."""
