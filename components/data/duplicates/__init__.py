"""Which pictures repeat or leak: the parts of the stage `deduplicate`."""
