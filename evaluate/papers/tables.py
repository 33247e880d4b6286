"""Tables of papers that can be measured again, by name.

To add a table, write its rows and a function that does one trial, in a file named after the
paper's attack, and add it here.
"""

from __future__ import annotations

from collections.abc import Mapping

from . import dlg_ig, rconv, sme, spearpp
from .table import Table

TABLES: Mapping[str, Table] = {
    table.name: table for table in (*spearpp.TABLES, *sme.TABLES, *dlg_ig.TABLES, *rconv.TABLES)
}
"""Every table by name."""
