"""Tables of papers that can be measured again, by name.

To add a table, write its rows and a function that does one trial, in a file named after the
paper's attack, and add it here.
"""

from __future__ import annotations

from collections.abc import Mapping

from . import tables_ig, tables_sme, tables_spearpp
from .reproduce import Table

TABLES: Mapping[str, Table] = {
    table.name: table for table in (*tables_spearpp.TABLES, *tables_sme.TABLES, *tables_ig.TABLES)
}
"""Every table by name."""
