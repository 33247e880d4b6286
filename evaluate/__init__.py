"""The harness: runs clients under defenses, attacks what they upload, scores and records."""
