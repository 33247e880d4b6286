"""Tables of papers that can be reproduced, by name.

To add a table, write its rows and a function for one trial in a file named after the paper's
attack. Then add the file here.
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
"""All tables by name."""
