"""Differential privacy: claims, proven bounds and audits."""
