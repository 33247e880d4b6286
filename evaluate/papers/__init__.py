"""Tables of papers, measured again."""
