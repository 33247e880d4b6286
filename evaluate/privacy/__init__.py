"""What is claimed, proven and audited of differential privacy."""
