"""Layer profiles: costs of a model known from a file alone."""
