"""Training scripts that ship with the package."""
