"""The report's page: what is read from each stage, the plots, the template."""
