"""Baselines of VITR that embed each side by itself: VSE∞ and VSRN++."""
