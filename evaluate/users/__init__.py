"""What users provide: configurations, names and classes."""
