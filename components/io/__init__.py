"""What all stages share: errors, records on disk, outcomes per row, resumable work, progress."""
