"""From rows to conclusions."""
