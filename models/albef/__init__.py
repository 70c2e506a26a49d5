"""ALBEF: align before fuse, with momentum distillation."""
