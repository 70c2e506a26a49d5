"""What pictures and captions must be, and how they are made so."""
