"""Engines that run cells: processes of this machine, or a Ray cluster."""
