"""Datasets by name and by path."""
