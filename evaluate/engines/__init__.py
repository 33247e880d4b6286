"""Where cells run: processes here, or a Ray cluster."""
