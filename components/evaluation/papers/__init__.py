"""Numbers that the papers report, as data, and whether a run may stand beside them."""
