"""Runs: from a configuration to stored rows."""
