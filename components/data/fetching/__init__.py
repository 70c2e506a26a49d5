"""From a row's URL to a picture's bytes: the parts of the stage `download`."""
