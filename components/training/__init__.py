"""From shards to trained weights, through Ray Train."""
