"""Scenarios and victims: what is attacked."""
