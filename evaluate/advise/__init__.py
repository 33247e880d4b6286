"""From a question about DP parameters to a recommended setting."""
