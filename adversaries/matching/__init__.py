"""Searches for a guess whose replayed upload matches the observed upload."""
