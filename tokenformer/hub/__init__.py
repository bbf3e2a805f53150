"""Weights in and out: our folders, official files, Hugging Face."""
