"""Pages from rows: frontier, figures, gallery."""

from .page import write_report
from .picture import write_picture

__all__ = ["write_picture", "write_report"]
