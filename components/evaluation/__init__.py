"""From trained weights to numbers and a report."""
