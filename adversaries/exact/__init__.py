"""Exact recovery from the gradient of a linear layer."""
