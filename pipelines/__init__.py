"""What runs when: the command line, the parameters, DVC's graph and the Prefect flows."""
