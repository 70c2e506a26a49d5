"""``vlp launch``: clusters rendered from ``infra/clusters.yaml``, checked, and started."""
