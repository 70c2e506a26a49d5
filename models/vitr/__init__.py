"""VITR: relation-focused retrieval on top of a dual encoder."""
