"""The front door: what `import leakfrontier` offers."""
