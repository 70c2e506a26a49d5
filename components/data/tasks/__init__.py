"""annotations of the fine-tuning tasks, read from their published layouts and written beside the pictures."""
