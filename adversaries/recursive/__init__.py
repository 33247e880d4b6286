"""Recovery layer by layer, from the last to the first."""
