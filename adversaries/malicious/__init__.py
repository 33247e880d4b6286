"""Attacks by servers that send crafted models."""
