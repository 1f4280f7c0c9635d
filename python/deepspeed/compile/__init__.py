"""The section ``compile`` of the configuration under the path that scripts import."""
