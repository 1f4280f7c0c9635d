"""Other functions of Gaudi."""
