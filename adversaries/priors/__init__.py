"""Guesses from public data alone, learned inversion, and attacks that are given candidates."""
