"""What `penteract plan` shows while it searches, and the files that it writes."""
