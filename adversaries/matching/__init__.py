"""Searches: guesses whose replayed upload matches the observed one."""
