"""The only path of an upload, and federated training."""
