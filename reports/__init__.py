"""From rows to pages: frontier, figures, gallery."""
