"""Image and text encoders with outputs of several depths: what HAT, VITR and the baselines stand on."""
