"""HAT: hierarchical alignment of two Transformers for retrieval."""
