"""What users give us: configurations, names, classes."""
