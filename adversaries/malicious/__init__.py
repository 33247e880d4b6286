"""Servers that send models of their own."""
