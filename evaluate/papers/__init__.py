"""Reproduction of tables of papers."""
