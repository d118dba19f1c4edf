"""Pictures and numbers of trained short-run models."""
