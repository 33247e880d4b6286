"""Attacks on language models."""
