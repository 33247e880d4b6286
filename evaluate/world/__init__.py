"""What is attacked: scenarios and victims."""
