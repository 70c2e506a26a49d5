"""What the stages do: plain functions of typed parameters and paths. No DVC and no Prefect in here."""
