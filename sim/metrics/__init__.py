"""Pure functions of the tables of a run."""
