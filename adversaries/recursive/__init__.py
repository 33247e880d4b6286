"""Layer-by-layer recovery, from the last layer to the first."""
