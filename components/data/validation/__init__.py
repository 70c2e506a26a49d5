"""What data must be to pass the gate: the parts of the stage `validate`."""
