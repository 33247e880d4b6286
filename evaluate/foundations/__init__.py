"""Foundations that every other room uses."""
