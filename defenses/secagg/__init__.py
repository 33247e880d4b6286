"""Secure aggregation and its protocol."""
