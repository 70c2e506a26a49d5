"""Torch modules and losses. They open no files and know nothing of Ray."""
