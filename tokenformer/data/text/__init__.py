"""Text: from raw files to prepared sets of tokens, and their samples."""
