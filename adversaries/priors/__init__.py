"""What public data alone gives, and attacks that are given candidates."""
