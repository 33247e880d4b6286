"""Tables of papers that can be measured again, by name.

To add a table, write its rows and a function that does one trial, in a file named after the
paper's attack, and add it here.
"""

from __future__ import annotations

from collections.abc import Mapping

from . import ares, dager, dlg_ig, loki, rconv, robbing_the_fed, sme, somp, spearpp
from .table import Table

TABLES: Mapping[str, Table] = {
    table.name: table
    for paper in (spearpp, sme, dlg_ig, ares, robbing_the_fed, loki, rconv, dager, somp)
    for table in paper.TABLES
}
"""Every table by name."""
