"""The one path of an upload, and federated training."""
