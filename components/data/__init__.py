"""From lists of URLs to validated shards."""
