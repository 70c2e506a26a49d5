"""Source lists in their many layouts, read row by row."""
