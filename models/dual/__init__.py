"""The dual encoder: one vector a picture, one a caption, compared by cosine; the floor of all comparisons."""
